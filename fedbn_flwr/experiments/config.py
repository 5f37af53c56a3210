"""The options that all methods share, parsed once; an invalid value is a one-line error."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin

from fedbn_flwr.client.class_metrics import CLASS_METRICS
from fedbn_flwr.client.precision import PRECISIONS
from fedbn_flwr.client.training import OPTIMIZERS
from fedbn_flwr.data import parse_augmentation
from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.wire import wire_key

Value = bool | int | float | str
#: values of `log-to`
SINKS = ("tensorboard", "wandb")


class UsageError(ValueError):
    """Bad input: the message is one line that names what was wrong and what is allowed."""


def option(default: Value, text: str) -> Any:
    """An option with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """The options that every method shares; a strategy's own ones are read from its constructor."""

    plugins: str = option("", "comma-separated modules that register methods, normalizers and more; imported first")
    method: str = option("fedavg", "STRATEGY[+NORM][:key=value]..., e.g. fixbn:freeze-round=0.3 or fedavg+gn")
    norm: str = option("bn", "normalizer of the model, for methods that do not set one themselves")
    norm_options: str = option("", "options of the normalizer, e.g. r_max=3,d_max=5 for brn")
    groups: int = option(2, "number of groups of group normalization")
    model: str = option("small-cnn", "model: a name, or package.module:function")
    dataset: str = option("digits", "data set: a name, synthetic:n=..., folder:PATH, package.module:function, or sites")
    classes: str = option("", "comma-separated names of the classes, in the order of the model's outputs")
    mean: str = option(
        "", "mean for normalization, one number from 0 to 1 per channel; empty: computed from training data"
    )
    std: str = option("", "standard deviation for normalization, one number per channel; needs mean")
    image_size: int = option(0, "side length that images are resized to; 0: as in the data set")
    data_root: str = option("", "folder of data sets on disk")
    image_workers: int = option(
        2, "processes that decode image files ahead of training; 0: the training process decodes them"
    )
    partition: str = option("classes:2", "how training data are split: iid, dirichlet:0.1, classes:2, domain:1, ...")
    clients: int = option(5, "number of clients; 0: one per node of the federation")
    min_nodes: int = option(0, "start a round when this many nodes are connected; 0: all nodes that the run began with")
    fraction_train: float = option(1.0, "share of the clients that take part in a round")
    fraction_evaluate: float = option(0.0, "share of the clients that evaluate the model themselves")
    rounds: int = option(60, "number of rounds")
    local_steps: int = option(5, "mini-batch steps per client and round; 0: use local-epochs")
    local_epochs: int = option(0, "epochs per client and round; above 0, replaces local-steps")
    budget_epochs: float = option(
        0.0, "choose rounds so that all clients together make this many passes over the data; 0: use rounds"
    )
    batch_size: int = option(32, "samples in a mini-batch")
    replacement: bool = option(False, "draw mini-batches with replacement")
    augmentation: str = option(
        "none",
        "augmentation of training images: none, crop or crop-flip[:padding=PIXELS][:fill=VALUE], "
        "resized-crop-flip[:scale=SHARE], flip-rotate[:degrees=DEGREES], random-crop",
    )
    optimizer: str = option("sgd", "sgd or adam")
    lr: float = option(0.1, "local learning rate")
    lr_schedule: str = option(
        "0.1@0.5,0.1@0.75", "comma-separated FACTOR@WHEN or =VALUE@WHEN; WHEN: fraction of the run, round, or freeze"
    )
    momentum: float = option(0.0, "momentum of sgd")
    weight_decay: float = option(0.0, "weight decay")
    precision: str = option("float32", "float32, tf32 (float32 with TF32 products, on a GPU) or bf16 (autocast)")
    evaluate_every: int = option(10, "evaluate on the test data every N rounds, and after the last")
    train_loss_global: bool = option(
        False, "also report the global model's loss on all training data, in evaluated rounds"
    )
    record_dynamics: int = option(
        0,
        "write dynamics.jsonl: how each BN layer's statistics change, how far they are from the global ones, and their "
        "variance over this many rounds; 0: off",
    )
    log_to: str = option("", "also log each round to tensorboard, wandb (Weights & Biases), or both")
    class_metrics: str = option(
        "", "metrics per class on each site's test data, for the data set sites: f1, auc, precision, recall"
    )
    target_accuracy: float = option(
        0.0, "also report rounds, exchanges and bytes until this accuracy is reached; 0: off"
    )
    seed: int = option(0, "seed of everything: model, partition, batches, sampling")
    device: str = option("auto", "cpu, cuda or auto")
    init_from: str = option("", "file with the initial model: safetensors or a torch state dict")
    validation: float = option(
        0.0, "hold out this share of the training data and evaluate on it instead of the test data"
    )
    threads: int = option(
        1,
        "torch threads per process; 1: same bits for any number of cores; 0: torch decides",
    )
    workers: int = option(
        0,
        "processes that share the clients; 0: one, or one per core in a long run of the engine stacked",
    )
    chunk: int = option(
        0,
        "most clients in a stack; 0: as many as speed up a step (20, 5 or 1 on a CPU) and fit into half of the memory",
    )
    timeout: float = option(3600.0, "seconds that clients have to reply in a round")
    exchange_timeout: float = option(0.0, "seconds that clients have for one exchange of a layer-wise step; 0: timeout")
    exchange_port: int = option(
        -1,
        "port of the side channel for layer-wise exchanges on the ServerApp; 0: exchanges are messages; "
        "-1: FEDBN_FLWR_EXCHANGE_PORT in the ServerApp's environment, or none",
    )
    exchange_address: str = option("", "HOST:PORT at which nodes reach exchange-port, if its environment does not say")
    connect_timeout: float = option(120.0, "seconds that nodes have to connect to exchange-port in a round")
    node_timeout: float = option(300.0, "seconds to wait for nodes to connect, at the start and before each round")
    results_dir: str = option("results", "folder for results")
    checkpoint_every: int = option(0, "write a checkpoint every N rounds, for resume; 0: none")
    resume: str = option("", "continue the run in this results folder from its last checkpoint, with its saved options")
    state_dir: str = option("", "folder for the clients' state; empty: in memory (not with the engine ray)")

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, smallest in _SMALLEST.items():
            if getattr(self, name) < smallest:
                raise UsageError(f"{wire_key(name)} must be at least {smallest}, got {getattr(self, name)}")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise UsageError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        try:
            parse_augmentation(self.augmentation)
        except ValueError as error:
            raise UsageError(str(error)) from None
        for name in ("class_names", "metric_names", "sink_names", "normalization"):
            getattr(self, name)  # refuses what it cannot read
        for name in ("fraction_train", "fraction_evaluate", "validation", "target_accuracy"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{wire_key(name)} must be between 0 and 1, got {getattr(self, name)}")
        if 0 < self.clients < self.min_nodes:
            raise UsageError(f"min-nodes must be at most clients, got {self.min_nodes} of {self.clients}")
        if self.fraction_train == 0:
            raise UsageError("fraction-train must be above 0")
        if not (self.local_steps or self.local_epochs):
            raise UsageError("one of local-steps and local-epochs must be above 0")

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes by their numbers; empty if the data decide."""
        names = _listed(self.classes)
        if doubled := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"classes names {doubled[0]!r} twice")
        return names

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The per-class metrics that are asked for."""
        return _known_names(self.class_metrics, "metric", CLASS_METRICS, "class-metrics")

    @property
    def sink_names(self) -> tuple[str, ...]:
        """The sinks that also take the numbers of each round."""
        return _known_names(self.log_to, "sink", SINKS, "log-to")

    @property
    def normalization(self) -> tuple[Channels, Channels] | None:
        """Mean and standard deviation of every channel; None if the data decide."""
        mean, std = (_numbers(name, getattr(self, name)) for name in ("mean", "std"))
        if bool(mean) != bool(std) or any(number <= 0 for number in std):
            raise UsageError(
                f"mean and std go together, and std is above 0, got mean={self.mean!r} and std={self.std!r}"
            )
        return (mean, std) if mean else None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Read kebab-case keys whose values are of the right type or text."""
        known = {wire_key(item.name): item for item in fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise UsageError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
        parsed: dict[str, Any] = {
            known[key].name: convert(key, value, type(known[key].default)) for key, value in values.items()
        }
        return cls(**parsed)

    def to_mapping(self) -> dict[str, Value]:
        """The options by their kebab-case keys."""
        return {wire_key(item.name): getattr(self, item.name) for item in fields(self)}


_SMALLEST: dict[str, float] = {
    "groups": 1,
    "image_size": 0,
    "image_workers": 0,
    "clients": 0,
    "min_nodes": 0,
    "rounds": 1,
    "local_steps": 0,
    "local_epochs": 0,
    "budget_epochs": 0,
    "batch_size": 1,
    "lr": 0,
    "momentum": 0,
    "weight_decay": 0,
    "evaluate_every": 1,
    "threads": 0,
    "workers": 0,
    "chunk": 0,
    "timeout": 0,
    "exchange_timeout": 0,
    "exchange_port": -1,
    "connect_timeout": 0,
    "checkpoint_every": 0,
    "record_dynamics": 0,
    "node_timeout": 0,
}

_KNOWN: dict[str, Collection[str]] = {
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
}


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _known_names(text: str, what: str, known: Collection[str], option_name: str) -> tuple[str, ...]:
    names = _listed(text)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown {what} {unknown[0]!r} in {option_name}; known: {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _numbers(name: str, text: str) -> Channels:
    try:
        numbers = tuple(float(part) for part in _listed(text))
    except ValueError:
        numbers = (float("nan"),)
    if not all(map(isfinite, numbers)):
        raise UsageError(f"{name} must be numbers with commas between, got {text!r}")
    return numbers


def convert(key: str, value: Any, kind: Any) -> Value:
    """Turn text or a number into what an option takes; `kind` is a type, literals, or a union of these."""
    kinds = list(_types_of(kind))
    for candidate in kinds:
        try:
            return _convert(value, candidate)
        except ValueError:
            continue
    raise UsageError(f"{key} must be {' or '.join(_SPOKEN[part] for part in kinds)}, got {value!r}")


def is_written(kind: Any) -> bool:
    """Whether a command line can say it: numbers, text, true or false, and not an object of Python's."""
    return all(part in _SPOKEN for part in _types_of(kind))


def _types_of(kind: Any) -> Iterator[type]:
    if get_origin(kind) is Literal:  # the constructor says which there are
        yield from dict.fromkeys(map(type, get_args(kind)))
    elif get_args(kind):
        for part in get_args(kind):
            yield from _types_of(part)
    elif kind is not NoneType:
        yield kind


_SPOKEN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert(value: Any, kind: type) -> Value:
    if kind is bool:
        if str(value).lower() not in ("true", "false"):
            raise ValueError
        return str(value).lower() == "true"
    if isinstance(value, bool):
        raise ValueError
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    if kind is float and not isfinite(float(value)):
        raise ValueError
    return kind(value)  # type: ignore[no-any-return]
