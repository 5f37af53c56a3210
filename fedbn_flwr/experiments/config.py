"""The options that all methods share, parsed once, with one clear line for a value that cannot be."""

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

    plugins: str = option("", "comma-separated modules to import first, which register methods, normalizers, ...")
    method: str = option("fedavg", "STRATEGY[+NORM][:key=value]..., e.g. fixbn:freeze-round=0.3 or fedavg+gn")
    norm: str = option("bn", "normalizer of the model, for methods that do not bring one")
    norm_options: str = option("", "options of the normalizer, e.g. r_max=3,d_max=5 for brn")
    groups: int = option(2, "number of groups of group normalization")
    model: str = option("small-cnn", "model, or package.module:function")
    dataset: str = option("digits", "data set, synthetic:n=..., folder:PATH, package.module:function, or sites")
    classes: str = option("", "comma-separated names of the classes, in the order of their numbers")
    mean: str = option("", "normalize with this mean, one number from 0 to 1 a channel; empty: of the training data")
    std: str = option("", "normalize with this standard deviation, one number a channel; given together with mean")
    image_size: int = option(0, "resize images to this side; 0 keeps the data set's own")
    data_root: str = option("", "folder of data sets on disk")
    image_workers: int = option(
        2, "processes that decode image files ahead of training; 0: none, the one that trains decodes them"
    )
    partition: str = option("classes:2", "how training data are spread: iid, dirichlet:0.1, classes:2, domain:1, ...")
    clients: int = option(5, "number of clients; 0 means one for every node of the federation")
    min_nodes: int = option(0, "start a round only with so many connected nodes; 0: all that the run began with")
    fraction_train: float = option(1.0, "share of the clients that take part in a round")
    fraction_evaluate: float = option(0.0, "share of the clients that evaluate the model themselves")
    rounds: int = option(60, "number of rounds")
    local_steps: int = option(5, "mini-batch steps a round and client; 0 means that local-epochs counts")
    local_epochs: int = option(0, "epochs a round and client; above 0 it is used instead of local-steps")
    budget_epochs: float = option(0.0, "set the rounds so that all clients together see the data this often")
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
        "0.1@0.5,0.1@0.75", "FACTOR@WHEN or =VALUE@WHEN, comma-separated; WHEN: fraction, rounds or 'freeze'"
    )
    momentum: float = option(0.0, "momentum of sgd")
    weight_decay: float = option(0.0, "weight decay")
    precision: str = option("float32", "float32, tf32 (float32 with TF32 products, on a GPU) or bf16 (autocast)")
    evaluate_every: int = option(10, "evaluate on the test data every so many rounds, and after the last")
    train_loss_global: bool = option(
        False, "also report the model's loss on all training data, in the rounds that are evaluated"
    )
    record_dynamics: int = option(
        0,
        "write dynamics.jsonl: each BN layer's statistics from round to round, far from the global ones, and their "
        "variance over so many rounds; 0: do not",
    )
    log_to: str = option("", "also write each round's numbers to tensorboard, wandb (Weights & Biases), or both")
    class_metrics: str = option(
        "", "per-class metrics of every site's test data, for the data set sites: f1, auc, precision, recall"
    )
    target_accuracy: float = option(0.0, "also report the rounds, exchanges and bytes until this accuracy")
    seed: int = option(0, "seed of everything: model, partition, batches, sampling")
    device: str = option("auto", "cpu, cuda or auto")
    init_from: str = option("", "start from this file: safetensors or a torch state dict")
    validation: float = option(0.0, "test on this share of the training data, held out, instead of the test data")
    threads: int = option(
        1,
        "torch threads of a process: 1 gives the same bits on machines with any number of cores; 0 leaves it to torch",
    )
    workers: int = option(
        0,
        "processes that share the clients; 0: one, or in a long run of the engine stacked one for each core",
    )
    chunk: int = option(
        0,
        "largest stack of clients; 0: as many as speed up a step (20, 5 or 1 on a CPU) and fit into half of the memory",
    )
    timeout: float = option(3600.0, "seconds that clients have to answer in a round")
    exchange_timeout: float = option(0.0, "seconds that clients have for one exchange of a layer-wise step; 0: timeout")
    exchange_port: int = option(
        -1,
        "port on which the ServerApp takes the exchanges of layer-wise steps; 0: none, they go by messages; "
        "-1: FEDBN_FLWR_EXCHANGE_PORT in its environment, or none",
    )
    exchange_address: str = option("", "HOST:PORT by which nodes reach exchange-port, where its environment has none")
    connect_timeout: float = option(120.0, "seconds that nodes have to connect to exchange-port, once a round")
    node_timeout: float = option(300.0, "seconds to wait for nodes to connect, at the start and before each round")
    results_dir: str = option("results", "where results go")
    checkpoint_every: int = option(0, "write a checkpoint every so many rounds, for --resume; 0: none")
    resume: str = option(
        "", "go on with the run in this folder of results after its last checkpoint, under the options that it has"
    )
    state_dir: str = option(
        "", "keep what clients remember in files of this folder, and not in memory (not with the engine ray)"
    )

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
