"""The data, the partition and the model of an experiment: made once a process, shared by all its clients."""

import pickle
from dataclasses import replace
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr import data, models, norm
from fedbn_flwr.client.evaluation import batch_sizes
from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.method import read_data
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.randomness import torch_generator

CLASSIFICATION = "classification"
#: the share of the training data and the draw of the validation split are the same for every seed
VALIDATION_SEED = 0


class Form(NamedTuple):
    """What a model must know of the data."""

    num_classes: int
    in_channels: int
    image_size: int


#: by what distinguishes them, data that this process has from another one
_shared: dict[str, data.Data] = {}


def load_data(config: Config) -> data.Data:
    """The data set, or with `validation` the training data with a part held out in place of the test data."""
    if shared := _shared.get(_data_key(config)):
        return shared
    loaded = _adapted(read_data(config), config.classes, config.mean, config.std)
    return loaded.validation_split(config.validation, VALIDATION_SEED) if config.validation else loaded


def unlabeled_inputs(config: Config, device: torch.device) -> dict[str, list[Tensor]]:
    """Return, by their number, batches of training inputs of the domain that nobody trains with, to adapt BN to.

    There are none where other data are tested, or if the model has no BN statistics.
    """
    if not config.unseen or config.validation or norm.lacks(shared_model(config), "statistics"):
        return {}
    train, (_, split) = load_data(config).train, data.leave_out(read_data(replace(config, unseen="")), config.unseen)
    split, counts = replace(split, mean=train.mean, std=train.std), {"20": 20, "100": 100, "all": len(split)}
    rows = torch.randperm(len(split), generator=torch_generator(config.seed, "unlabeled"))
    return {
        name: [inputs for inputs, _ in split.batches(rows[:count], batch_sizes(split, count, 500), device)]
        for name, count in counts.items()
        if count <= len(split)
    }


class SharedData:
    """The data of an experiment on their way to worker processes of this machine, which map the same memory."""

    def __init__(self, config: Config, loaded: data.Data) -> None:
        self._config, self._data = config, loaded

    def __reduce__(self) -> tuple[Any, ...]:
        # at each sending, because a handle of the memory is good for one process
        return _take_data, (self._config, bytes(ForkingPickler.dumps(self._data)))


def share_data(config: Config) -> SharedData | None:
    """Return the data for worker processes; None if they cannot be shared, and each process loads its own."""
    loaded = load_data(config)
    return SharedData(config, loaded) if loaded.share() else None


def _take_data(config: Config, packed: bytes) -> None:
    _shared[_data_key(config)] = pickle.loads(packed)


def _data_key(config: Config) -> str:
    read = config.dataset, config.unseen, config.image_size, config.data_root, config.image_workers
    return repr((*read, config.classes, config.mean, config.std, config.validation))


@lru_cache(maxsize=2)
def _adapted(loaded: data.Data, class_names: tuple[str, ...], mean: Channels, std: Channels) -> data.Data:
    """Number the classes and normalize as the options say; the same arguments give the same object."""
    numbered = data.renumbered(loaded, class_names) if class_names else loaded
    return data.normalized(numbered, mean, std) if mean else numbered


def normalization(config: Config) -> dict[str, Channels]:
    """Return mean and standard deviation that the run's inputs are normalized with, in float32 as it is done."""
    used = config if config.mean or config.dataset == data.SITES else load_data(config).train
    return {name: tuple(np.asarray(getattr(used, name), np.float32).tolist()) for name in ("mean", "std")}


def form_of(config: Config) -> Form:
    """Return what a model must know of the experiment's data."""
    loaded = load_data(config)
    return Form(loaded.num_classes, loaded.in_channels, loaded.image_size)


def make_partition(config: Config, clients: int) -> list[NDArray[np.int64]]:
    """Draw every client's samples; a UsageError says why they cannot be split so."""
    try:
        return data.partition(config.partition, load_data(config), clients, config.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error


def node_names(config: Config) -> list[int | str]:
    """Return the clients' domains if each has one that no other client has, else their numbers."""
    loaded, numbers = load_data(config), range(config.clients)
    if (domains := loaded.train.domains) is None:
        return list(numbers)
    parts = make_partition(config, config.clients)
    held = [domain for part in parts for domain in domains[torch.from_numpy(part)].unique().tolist()]
    is_own = len(set(held)) == len(held) == len(parts)
    return [loaded.domain_names[domain] for domain in held] if is_own else list(numbers)


def fresh_model(config: Config, form: Form | None = None) -> nn.Module:
    """The model of an experiment in its initial state; for data of this form, if they are not here."""
    form = form or form_of(config)
    return models.build(
        config.model,
        num_classes=form.num_classes,
        in_channels=form.in_channels,
        image_size=form.image_size,
        norm=config.norm,
        seed=config.seed,
        init_from=config.init_from or None,
        groups=config.groups,
        normalize_features=config.normalize_features,
        **dict(config.norm_options),
    )


@lru_cache(maxsize=2)
def shared_model(config: Config) -> nn.Module:
    """Return the one model of this process; every user overwrites its whole state first."""
    return fresh_model(config)


def rounds_within_budget(config: Config, clients: int, samples: int = 0) -> Config:
    """Return the number of rounds; with `budget-epochs`, enough of them to see all data so often.

    `samples` is the number of training samples, where the data themselves need not be there.
    """
    if not config.budget_epochs:
        return config
    taking_part = config.clients_in_round(clients)
    if config.local_epochs:
        epochs_a_round = config.local_epochs * taking_part / clients
    else:
        samples = samples or len(load_data(config).train)
        epochs_a_round = config.local_steps * config.batch_size * taking_part / samples
    return replace(config, rounds=max(round(config.budget_epochs / epochs_a_round), 1))


def expected_steps(config: Config) -> int:
    """About how many steps all clients take in the whole run."""
    steps = config.local_steps
    if config.local_epochs:
        steps = config.local_epochs * (len(load_data(config).train) // (max(config.clients, 1) * config.batch_size) + 1)
    return rounds_within_budget(config, config.clients).rounds * config.clients_in_round() * steps


def absent_classes(config: Config) -> list[str]:
    """Return the names or numbers of the classes of which no client has a sample."""
    if config.dataset == data.SITES or not config.clients or load_data(config).task != CLASSIFICATION:
        return []
    loaded = load_data(config)
    held = set(loaded.train.labels[np.concatenate(make_partition(config, config.clients))].unique().tolist())
    names = loaded.class_names or [str(number) for number in range(loaded.num_classes)]
    return [name for number, name in enumerate(names) if number not in held]


def set_threads(config: Config) -> None:
    """Torch threads of this process."""
    if config.threads:
        torch.set_num_threads(config.threads)
