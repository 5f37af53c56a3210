"""What a run works with: data, their split over the clients, a model and a device, made once and
handed on.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr import data, models, norm
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.evaluation import evaluation_sizes
from fedbn_flwr.client.learning_task import LearningTask, task_of
from fedbn_flwr.data import Data, Split
from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.data.splits import side_of
from fedbn_flwr.device import pick_device, set_up_accelerator
from fedbn_flwr.experiments.config import Config, DataOptions, EngineOptions, ModelOptions
from fedbn_flwr.experiments.experiment import import_plugins, read_data
from fedbn_flwr.plugins.options import refusing
from fedbn_flwr.randomness import torch_generator

CLASSIFICATION = "classification"
#: the share of the training data and the draw of the validation split are the same for every seed
VALIDATION_SEED = 0


class Form(NamedTuple):
    """What a model must know of the data."""

    num_classes: int
    in_channels: int
    image_size: int

    @classmethod
    def of(cls, num_classes: int, shape: Sequence[int]) -> Self:
        """Return the form of samples of a shape."""
        return cls(num_classes, shape[0], side_of(shape))


@dataclass(frozen=True, eq=False)
class Material:
    """What the clients of a run share in a process.

    Worker processes of this machine map the memory of the data. The model is one object: each use
    begins by overwriting its whole state.
    """

    config: Config
    data: Data
    #: every client's samples; empty while nobody knows how many clients there are
    partition: Sequence[NDArray[np.int64]]
    model: nn.Module
    device: torch.device

    @classmethod
    def of(cls, config: Config, loaded: Data | None = None) -> Self:
        """Load data that are not there yet, split them and make a model.

        A UsageError says why this cannot be.
        """
        loaded = loaded or load_data(config.data)
        partition = []
        if config.clients:
            partition = make_partition(config, loaded, config.clients)
        return cls(
            config,
            loaded,
            partition,
            fresh_model(config.model, data_form(loaded), config.seed),
            pick_device(config.engine.device),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # at each sending, because a handle of the memory is good for one process
        shared = None
        if self.data.share():
            shared = bytes(ForkingPickler.dumps(self.data))
        return _take, (self.config, shared)

    @property
    def task(self) -> LearningTask:
        """Return what is learned from the data."""
        return task_of(self.data.task, self.config.model.objective)

    def client(self, row: int, partition_id: int = 0, memory: RecordDict | None = None) -> BNClient:
        """Make the client with these samples, for a node of this number with this memory."""
        return BNClient(
            self.model,
            self.data.train,
            test=self.data.test,
            num_classes=self.data.num_classes,
            indices=self.partition[row],
            partition_id=partition_id,
            memory=memory,
            device=str(self.device),
            task=self.task,
            captured=self.config.engine.captured,
        )


def _take(config: Config, shared: bytes | None) -> Material:
    """Return the material in another process of its machine."""
    import_plugins(config.plugins)
    return Material.of(config, pickle.loads(shared) if shared else None)


def load_data(options: DataOptions) -> Data:
    """The data set, or with `validation` the training data with a part held out in place of the
    test data.
    """
    loaded = read_data(options)
    if options.classes:
        loaded = data.renumbered(loaded, options.classes)
    if options.validation:
        loaded = loaded.validation_split(options.validation, VALIDATION_SEED)
    if options.mean:
        return data.normalized(loaded, options.mean, options.std)
    return loaded


def unlabeled_inputs(material: Material) -> dict[str, list[Tensor]]:
    """Return, by their number, batches of training inputs of the domain that nobody trains with, to
    adapt BN to.

    There are none where other data are tested, or if the model has no BN statistics.
    """
    config = material.config
    train = material.data.train
    if not config.data.unseen or config.data.validation:
        return {}
    if norm.lacks(material.model, "statistics", in_training=False):
        return {}
    _, split = data.leave_out(read_data(replace(config.data, unseen="")), config.data.unseen)
    split = replace(split, mean=train.mean, std=train.std)
    rows = torch.randperm(len(split), generator=torch_generator(config.seed, "unlabeled"))
    batches = {}
    for name, count in {"20": 20, "100": 100, "all": len(split)}.items():
        if count <= len(split):
            sizes = evaluation_sizes(split, count, 500, material.device)
            loaded = split.batches(rows[:count], sizes, material.device)
            batches[name] = [inputs for inputs, _ in loaded]
    return batches


def normalization(used: DataOptions | Split) -> dict[str, Channels]:
    """Return mean and standard deviation that inputs are normalized with, in float32 as it is
    done.
    """
    return {
        name: tuple(np.asarray(getattr(used, name), np.float32).tolist())
        for name in ("mean", "std")
    }


def data_form(loaded: Data) -> Form:
    """Return what a model must know of the data."""
    return Form.of(loaded.num_classes, loaded.train.inputs.shape[1:])


def make_partition(config: Config, loaded: Data, clients: int) -> list[NDArray[np.int64]]:
    """Draw every client's samples; a UsageError says why they cannot be split so."""
    with refusing():
        return data.partition(config.data.partition, loaded, clients, config.seed)


def node_names(loaded: Data, partition: Sequence[NDArray[np.int64]]) -> list[int | str]:
    """Return the clients' domains if each has one that no other client has, else their numbers."""
    domains = loaded.train.domains
    if domains is None:
        return list(range(len(partition)))
    held = [
        domain for part in partition for domain in domains[torch.from_numpy(part)].unique().tolist()
    ]
    is_own = len(set(held)) == len(held) == len(partition)
    if is_own:
        return [loaded.domain_names[domain] for domain in held]
    return list(range(len(partition)))


def fresh_model(options: ModelOptions, form: Form, seed: int) -> nn.Module:
    """The model of an experiment in its initial state, for data of this form."""
    return models.build(
        options.model,
        norm=options.norm,
        seed=seed,
        init_from=options.init_from or None,
        groups=options.groups,
        normalize_features=options.normalize_features,
        trainable=options.trainable,
        **{**form._asdict(), **dict(options.norm_options)},
    )


def rounds_within_budget(config: Config, clients: int, samples: int) -> Config:
    """Return the number of rounds; with `budget-epochs`, enough of them to see all training samples
    so often.
    """
    if not config.budget_epochs:
        return config
    taking_part = config.clients_in_round(clients)
    if config.training.local_epochs:
        epochs_a_round = config.training.local_epochs * taking_part / clients
    else:
        epochs_a_round = (
            config.training.local_steps * config.training.batch_size * taking_part / samples
        )
    return replace(config, rounds=max(round(config.budget_epochs / epochs_a_round), 1))


def expected_steps(config: Config, samples: int) -> int:
    """About how many steps all clients take in the whole run, with so many training samples."""
    steps = config.training.local_steps
    if config.training.local_epochs:
        steps = config.training.local_epochs * (
            samples // (max(config.clients, 1) * config.training.batch_size) + 1
        )
    return (
        rounds_within_budget(config, config.clients, samples).rounds
        * config.clients_in_round()
        * steps
    )


def absent_classes(loaded: Data, partition: Sequence[NDArray[np.int64]]) -> list[str]:
    """Return the names or numbers of the classes of which no client has a sample."""
    if loaded.task != CLASSIFICATION or not partition:
        return []
    held = set(loaded.train.labels[np.concatenate(partition)].unique().tolist())
    names = loaded.class_names or [str(number) for number in range(loaded.num_classes)]
    return [name for number, name in enumerate(names) if number not in held]


def set_up_process(options: EngineOptions) -> None:
    """Set torch's threads in this process and, before its first use, the accelerator."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    if device.type != "cpu":
        set_up_accelerator(device, options.deterministic)
