"""The data, the partition and the model of an experiment: made once a process, shared by all its clients."""

import pickle
from dataclasses import replace
from functools import cache, lru_cache
from logging import WARNING
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr import data, models, norm
from fedbn_flwr.client import pick_device
from fedbn_flwr.client.learning_task import OBJECTIVES, task_of
from fedbn_flwr.client.training import logits_of
from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.data.splits import UNCLASSED
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.method import Experiment, read_data
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.output.sinks import check_sinks
from fedbn_flwr.experiments.results.rows import about_absent
from fedbn_flwr.layerwise.shared_statistics import check_layers
from fedbn_flwr.norm.detect import FunctionalBatchNorm
from fedbn_flwr.plugins import fingerprint
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.strategies import Layerwise

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
    read = config.dataset, config.image_size, config.data_root, config.image_workers
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
    """Draw every client's samples."""
    return data.partition(config.partition, load_data(config), clients, config.seed)


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


def check(experiment: Experiment) -> None:
    """Find what cannot work before anything is started: device, data, partition, model and strategy."""
    config = experiment.config
    strategy, drawn = experiment.make_strategy(config.clients), config.clients_in_round()
    check_sinks(config.log_to)
    try:
        pick_device(config.device)
        if config.dataset != data.SITES:
            check_task(config)
            functional = check_shapes(config)
            if not any(parameter.requires_grad for parameter in shared_model(config).parameters()):
                raise UsageError(f"model {config.model!r} has no parameter that learns (with requires_grad=True)")
            lacking = norm.lacks(shared_model(config), strategy.needs)
            if functional and strategy.needs != "none":
                lacking = "the model's forward calls F.batch_norm, which it finds in layers only"
            if lacking:
                raise UsageError(f"method {config.method!r} would be another one: {lacking}")
            if isinstance(strategy, Layerwise):
                try:
                    check_layers(shared_model(config))
                except TypeError as error:
                    raise UsageError(f"method {config.method!r}: {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if config.dataset == data.SITES and experiment.strategy_class.one_node:
        raise UsageError(
            f"method {config.method!r} needs all data in one place, but the data set 'sites' stays at the sites"
        )
    if config.dataset == data.SITES and config.objective in OBJECTIVES:
        raise UsageError(f"objective {config.objective!r} is for float targets, and the data of sites have classes")
    if config.class_metrics and config.dataset != data.SITES and (targets := UNCLASSED.get(load_data(config).task)):
        raise UsageError(f"class-metrics are of labels, and {load_data(config).name} has {targets}")
    if config.clients:
        check_partition(config, config.clients)
    fewest = strategy.averager.fewest_nodes
    if config.clients and drawn < fewest:
        why = f"robust={strategy.averager} needs {fewest} nodes in a round"
        raise UsageError(f"method {config.method!r}: {why}, and {drawn} take part: {fewest - drawn} missing")


def check_task(config: Config) -> None:
    """Refuse a model or an augmentation that is not for the data set's task."""
    loaded = load_data(config)
    task = task_of(loaded.task, config.objective)
    if not (task.has_classes or config.objective):
        able = f"{', '.join(OBJECTIVES)} or package.module:function"
        raise UsageError(f"{loaded.name} has float targets, which need objective={able}; classes are integers from 0")
    task.check_augmentation(config.augmentation)
    entry = models.MODELS.get(config.model)
    if entry is not None and task_of(entry.task).placed != task.placed:
        able = ", ".join(name for name, other in models.MODELS.items() if task_of(other.task).placed == task.placed)
        raise UsageError(
            f"model {config.model!r} is for {entry.task}, {loaded.name} for {loaded.task}; there are: {able}"
        )


def check_shapes(config: Config) -> bool:
    """Refuse a model that cannot take the data's inputs, or has too few outputs for their classes.

    Return whether its forward pass calls `F.batch_norm` by itself.
    """
    loaded = load_data(config)
    if not len(loaded.test):
        raise UsageError(f"{loaded.name} has no test samples")
    splits = {"": loaded.train, "test ": loaded.test}
    functional = [_check_inputs(config, split, loaded.num_classes, role) for role, split in splits.items()]
    return any(functional)


def _check_inputs(config: Config, split: data.Split, num_classes: int, role: str) -> bool:
    model, shape = shared_model(config), tuple(split.inputs.shape[1:])
    if len(shape) != 3 and config.augmentation != "none":
        raise UsageError(f"augmentation {config.augmentation!r} is for images, not for inputs of the shape {shape}")
    modes = {layer: layer.training for layer in model.modules()}
    device = next((parameter.device for parameter in model.parameters()), None)
    kind, dtype = ("integers (ids: other numbers are float32)", torch.int64) if split.has_ids else ("inputs", None)
    try:
        with torch.no_grad(), FunctionalBatchNorm(model) as functional:
            outputs = model.eval()(torch.zeros(1, *shape, device=device, dtype=dtype))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"model {config.model!r} cannot take {role}{kind} of the shape {shape}: {error}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    logits = logits_of(outputs)
    if config.objective in OBJECTIVES and logits.numel() != num_classes:
        raise UsageError(f"model {config.model!r} has {logits.numel()} outputs for {num_classes} targets")
    if config.objective:
        targets = split.batch(torch.zeros(1, dtype=torch.int64), logits.device)[1]
        try:
            task_of(load_data(config).task, config.objective).loss(outputs, targets)
        except Exception as error:  # of whatever kind a user's function raises
            raise UsageError(f"objective {config.objective!r} fails for the outputs of the model: {error}") from error
    if load_data(config).task != "regression" and logits.dim() > 1 and logits.shape[1] != num_classes:
        about = f"model {config.model!r} has {logits.shape[1]} outputs for {num_classes} classes"
        if logits.shape[1] < num_classes:
            raise UsageError(about)
        _warn_once(f"{about}: a prediction of none of them counts as wrong")
    return bool(functional.found)


def check_partition(config: Config, clients: int) -> None:
    """Find a partition that cannot be, once the number of clients is known."""
    if config.dataset == data.SITES:
        return
    try:
        make_partition(config, clients)
    except ValueError as error:
        raise UsageError(str(error)) from error


def absent_classes(config: Config) -> list[str]:
    """Return the names or numbers of the classes of which no client has a sample."""
    if config.dataset == data.SITES or not config.clients or load_data(config).task != CLASSIFICATION:
        return []
    loaded = load_data(config)
    held = set(loaded.train.labels[np.concatenate(make_partition(config, config.clients))].unique().tolist())
    names = loaded.class_names or [str(number) for number in range(loaded.num_classes)]
    return [name for number, name in enumerate(names) if number not in held]


@cache
def _warn_once(line: str) -> None:
    """Log a warning, once a process: the methods of a comparison have the same data."""
    log(WARNING, line)


def check_simulation(experiment: Experiment) -> None:
    """Check a run that brings its own nodes, and so must know how many."""
    if experiment.config.dataset == data.SITES:
        raise UsageError("the data set 'sites' is at the sites of a deployment: submit the run with `flwr run`")
    check(experiment)
    names = load_data(experiment.config).class_names
    plain = ["".join(name.casefold().split()) for name in names]
    if alike := [name for name, short in zip(names, plain, strict=True) if plain.count(short) > 1]:
        _warn_once(f"classes differ only by upper case or spaces, and count as different ones: {', '.join(alike)}")
    if classes := absent_classes(experiment.config):
        _warn_once(about_absent(classes, experiment.config.partition, experiment.config.clients))


def state_folder(config: Config, run: Path) -> Path | None:
    """Return the folder for the nodes' memory in one run, named by the path of its results; None keeps it in RAM."""
    if not config.state_dir:
        return None
    # runs of several comparisons at once have folders of the same name
    folder = Path(config.state_dir).expanduser() / f"{run.name}-{fingerprint(str(run))}"
    return make_folder(folder, f"state-dir {config.state_dir!r}")


def refuse_own_nodes(config: Config) -> None:
    """Refuse `state-dir` and `workers` where Flower runs the nodes, in processes and with memory of its own."""
    if config.state_dir or config.workers > 1:
        given = f"state-dir {config.state_dir!r}" if config.state_dir else f"workers={config.workers}"
        raise UsageError(f"{given} only works with the engines 'stacked' and 'inprocess': Flower has its own nodes")


def set_threads(config: Config) -> None:
    """Torch threads of this process."""
    if config.threads:
        torch.set_num_threads(config.threads)
