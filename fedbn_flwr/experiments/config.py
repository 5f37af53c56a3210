"""The options that all methods share, parsed once, with one clear line for an impossible value.

On the command line and in a run configuration they are flat. A `Config` holds them by who reads
them: each of its groups goes where it is used, and no further.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Self

from fedbn_flwr.client.captured import Captured
from fedbn_flwr.client.evaluation import CLASS_METRICS
from fedbn_flwr.client.training import OPTIMIZERS, PRECISIONS
from fedbn_flwr.data import SITES, parse_augmentation
from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.plugins import Own, did_you_mean
from fedbn_flwr.plugins.options import (
    Option,
    Pairs,
    Range,
    UsageError,
    Value,
    as_value,
    option_key,
    options_of,
    unknown_option,
)
from fedbn_flwr.wire import wire_key


@dataclass(frozen=True)
class Options:
    """A group of options: fields with a help text, of types that can be written as text."""

    def __post_init__(self) -> None:
        """Refuse a value that an option does not take."""
        for option in options_of(type(self)).values():
            option.check(getattr(self, option.name), option_key(option.name))
        self.check()

    def check(self) -> None:
        """Refuse values that do not fit together; a subclass says which."""


def refuse_twice(key: str, names: tuple[str, ...]) -> None:
    """Refuse a name that an option has twice."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"{key} names {twice[0]!r} twice")


@dataclass(frozen=True)
class DataOptions(Options):
    """What is learned from, and how it is split over the clients."""

    dataset: Annotated[
        Own | str,
        "data set: a name, synthetic:n=..., folder:PATH, package.module:function, or sites",
    ] = "digits"
    classes: Annotated[
        tuple[str, ...], "comma-separated names of the classes, in the order of the model's outputs"
    ] = ()
    mean: Annotated[
        Channels,
        "mean for normalization, a number from 0 to 1 per channel; empty: the library's, or of "
        "training data",
    ] = ()
    std: Annotated[
        Channels, "standard deviation for normalization, one number per channel; needs mean"
    ] = ()
    image_size: Annotated[
        int, "side to resize images to; 0: that of the model's library, or of the data", Range(0)
    ] = 0
    channels: Annotated[
        int, "channels that grey images are repeated to; 0: as for image-size", Range(0)
    ] = 0
    data_root: Annotated[str, "folder of data sets on disk"] = ""
    image_workers: Annotated[
        int,
        "processes that decode image files ahead of training; 0: the training process decodes them",
        Range(0),
    ] = 2
    partition: Annotated[
        str,
        "how training data are split: iid, classes:2, ...; empty: domain, or classes for data "
        "without domains",
    ] = ""
    unseen: Annotated[
        str, "domain to test on, which nobody trains with; in comparisons `each`: all in turn"
    ] = ""
    validation: Annotated[
        float,
        "hold out this share of the training data and evaluate on it instead of the test data",
        Range(0, 1),
    ] = 0.0

    def check(self) -> None:
        """Refuse classes that are named twice, and one of mean and deviation without the other."""
        refuse_twice("classes", self.classes)
        if bool(self.mean) != bool(self.std) or any(number <= 0 for number in self.std):
            mean = as_value(self.mean)
            std = as_value(self.std)
            raise UsageError(
                f"mean and std must be given together, and std must be above 0, got mean={mean!r} "
                f"and std={std!r}"
            )
        if self.unseen and self.dataset == SITES:
            raise UsageError(
                "unseen leaves a domain of one data set out; to leave a site out, do not start "
                "its node"
            )


@dataclass(frozen=True)
class ModelOptions(Options):
    """What makes the model, and what it learns."""

    model: Annotated[
        Own | str, "model: a name, or package.module:function; or timm:NAME, torchvision:NAME"
    ] = "small-cnn"
    norm: Annotated[str, "normalizer of the model, for methods that do not set one themselves"] = (
        "bn"
    )
    norm_options: Annotated[Pairs, "options of the normalizer, e.g. r_max=3,d_max=5 for brn"] = ()
    groups: Annotated[int, "number of groups of group normalization", Range(1)] = 2
    normalize_features: Annotated[
        bool, "scale features to a mean square of 1 before the classifier (FN)"
    ] = False
    init_from: Annotated[
        str,
        "file with the initial model: safetensors or a torch state dict; or pretrained: the "
        "library's own weights",
    ] = ""
    trainable: Annotated[
        tuple[str, ...],
        "patterns of the parameters that learn: classifier.*, or all but !classifier.*; head: "
        "last layer; head=10: at ten times the learning rate of the others, which learn too",
    ] = ()
    objective: Annotated[
        Own | str,
        "loss to train with: mse, mae or bce (of float targets), or package.module:function; "
        "empty: the task's own",
    ] = ""


@dataclass(frozen=True)
class TrainingOptions(Options):
    """What a client does in a round: an `Instruction` begins with it."""

    local_steps: Annotated[
        int, "mini-batch steps per client and round; 0: use local-epochs", Range(0)
    ] = 5
    local_epochs: Annotated[
        int, "epochs per client and round; above 0, replaces local-steps", Range(0)
    ] = 0
    batch_size: Annotated[int, "samples in a mini-batch", Range(1)] = 32
    replacement: Annotated[bool, "draw mini-batches with replacement"] = False
    augmentation: Annotated[
        str,
        "augmentation of training images: none, crop or crop-flip[:padding=PIXELS][:fill=VALUE], "
        "resized-crop-flip[:scale=SHARE], flip-rotate[:degrees=DEGREES], random-crop",
    ] = "none"
    optimizer: Annotated[str, "sgd, adam or adamw (whose weight-decay is decoupled)"] = "sgd"
    lr: Annotated[float, "local learning rate", Range(0)] = 0.1
    momentum: Annotated[float, "momentum of sgd", Range(0)] = 0.0
    weight_decay: Annotated[float, "weight decay", Range(0)] = 0.0
    precision: Annotated[
        str, "float32, tf32 (TF32 products and convolutions on GPUs) or bf16 (autocast)"
    ] = "float32"

    def check(self) -> None:
        """Refuse names that nothing has, and a round without a step."""
        for name, known in (("optimizer", OPTIMIZERS), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"unknown {name} {getattr(self, name)!r}; "
                    f"{did_you_mean(getattr(self, name), known)}"
                )
        parse_augmentation(self.augmentation)
        if not (self.local_steps or self.local_epochs):
            raise UsageError("one of local-steps and local-epochs must be above 0")


@dataclass(frozen=True)
class EngineOptions(Options):
    """What trains the clients of a simulation, and on what."""

    device: Annotated[str, "cpu, auto, or a GPU such as cuda, cuda:1 or mps"] = "auto"
    deterministic: Annotated[
        bool, "repeat a run's bits on the same GPU; false: use its fastest algorithms"
    ] = True
    threads: Annotated[
        int,
        "torch threads per process; 1: same bits for any number of cores; 0: torch decides",
        Range(0),
    ] = 1
    workers: Annotated[
        int,
        "processes that share the clients; 0: one, or one per core in a long run of the engine "
        "stacked",
        Range(0),
    ] = 0
    chunk: Annotated[
        int,
        "most clients in a stack; 0: as many as speed up a step (20, 5 or 1 on a CPU) and fit "
        "into half of the memory, or a quarter of a GPU's",
        Range(0),
    ] = 0
    captured: Annotated[
        Captured,
        "on a GPU, record a step once and replay it in equal steps, with the same bits: of layers "
        "that are known (auto), of your own, too (always), or never",
    ] = "auto"
    state_dir: Annotated[
        str, "folder for the clients' state; empty: in memory (not with the engine ray)"
    ] = ""


@dataclass(frozen=True)
class NetworkOptions(Options):
    """Which nodes take part, and how long they are waited for."""

    sites: Annotated[
        tuple[str, ...],
        "comma-separated names of the sites of a deployment that take part; empty: all",
    ] = ()
    min_nodes: Annotated[
        int,
        "start a round when this many nodes are connected; 0: all nodes that the run began with",
        Range(0),
    ] = 0
    node_timeout: Annotated[
        float, "seconds to wait for nodes to connect, at the start and before each round", Range(0)
    ] = 300.0
    timeout: Annotated[float, "seconds that clients have to reply in a round", Range(0)] = 3600.0
    exchange_timeout: Annotated[
        float,
        "seconds that clients have for one exchange of a layer-wise step; 0: timeout",
        Range(0),
    ] = 0.0
    exchange_port: Annotated[
        int,
        "port of the side channel for layer-wise exchanges on the ServerApp; 0: exchanges are "
        "messages; -1: FEDBN_FLWR_EXCHANGE_PORT in the ServerApp's environment, or none",
        Range(-1),
    ] = -1
    exchange_address: Annotated[
        str, "HOST:PORT at which nodes reach exchange-port, if its environment does not say"
    ] = ""
    connect_timeout: Annotated[
        float, "seconds that nodes have to connect to exchange-port in a round", Range(0)
    ] = 120.0

    def check(self) -> None:
        """Refuse sites that are named twice."""
        refuse_twice("sites", self.sites)


@dataclass(frozen=True)
class ResultsOptions(Options):
    """What is measured, when a run ends early, and what is written where."""

    evaluate_every: Annotated[
        int, "evaluate on the test data every N rounds, and after the last", Range(1)
    ] = 10
    stop_at: Annotated[
        float,
        "end the run when the score reaches this, or falls to it where less is better; 0: off",
        Range(0),
    ] = 0.0
    stop_after: Annotated[
        int,
        "end the run at an evaluation this many rounds or more after that of the best score; 0: "
        "off",
        Range(0),
    ] = 0
    class_metrics: Annotated[
        tuple[str, ...],
        "metrics per class on the test data, of sites on each site's: f1, iou, precision, recall, "
        "auc (of float targets that are 0 or 1, too)",
    ] = ()
    train_loss_global: Annotated[
        bool, "also report the global model's loss on all training data, in evaluated rounds"
    ] = False
    record_dynamics: Annotated[
        int,
        "write dynamics.jsonl: how each BN layer's statistics change, how far they are from the "
        "global ones, and their variance over this many rounds; 0: off",
        Range(0),
    ] = 0
    log_to: Annotated[
        tuple[str, ...], "also log each round to tensorboard, wandb (Weights & Biases), or both"
    ] = ()
    results_dir: Annotated[str, "folder for results"] = "results"
    checkpoint_every: Annotated[
        int,
        "write a checkpoint every N rounds, for resume; 0: none; -1: as often as it costs little",
        Range(-1),
    ] = 0
    resume: Annotated[
        str,
        "continue the run in this results folder from its last checkpoint, with its saved options",
    ] = ""

    def check(self) -> None:
        """Refuse metrics that nothing computes."""
        unknown = [name for name in self.class_metrics if name not in CLASS_METRICS]
        if unknown:
            raise UsageError(
                f"unknown metric {unknown[0]!r} in class-metrics; known: {', '.join(CLASS_METRICS)}"
            )


#: the groups of a `Config`, by the names of its fields
GROUPS: dict[str, type[Options]] = {
    "data": DataOptions,
    "model": ModelOptions,
    "training": TrainingOptions,
    "engine": EngineOptions,
    "network": NetworkOptions,
    "results": ResultsOptions,
}


@dataclass(frozen=True)
class Config(Options):
    """The options that every method shares; a strategy's own ones are read from its constructor."""

    plugins: Annotated[
        str, "comma-separated modules that register methods, normalizers and more; imported first"
    ] = ""
    method: Annotated[
        Own | str, "STRATEGY[+NORM][:key=value]..., e.g. fixbn:freeze-round=0.3 or fedavg+gn"
    ] = "fedavg"
    seed: Annotated[int, "seed of everything: model, partition, batches, sampling"] = 0
    clients: Annotated[
        int,
        "number of clients, by default 5, or one per domain of data that are split so, or per "
        "node of a federation",
        Range(0),
    ] = 0
    rounds: Annotated[int, "number of rounds", Range(1)] = 60
    budget_epochs: Annotated[
        float,
        "choose rounds so that all clients together make this many passes over the data; 0: use "
        "rounds",
        Range(0),
    ] = 0.0
    fraction_train: Annotated[
        float, "share of the clients that take part in a round", Range(0, 1)
    ] = 1.0
    fraction_evaluate: Annotated[
        float, "share of the clients that evaluate the model themselves", Range(0, 1)
    ] = 0.0
    lr_schedule: Annotated[
        str,
        "comma-separated FACTOR@WHEN, =VALUE@WHEN, warmup@WHEN, cosine@WHEN; WHEN: share of run, "
        "round, or freeze",
    ] = "0.1@0.5,0.1@0.75"
    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    engine: EngineOptions = EngineOptions()
    network: NetworkOptions = NetworkOptions()
    results: ResultsOptions = ResultsOptions()

    def check(self) -> None:
        """Refuse numbers of clients that do not fit together."""
        sites = self.network.sites
        if 0 < self.clients < self.network.min_nodes:
            raise UsageError(
                f"min-nodes must be at most clients, got {self.network.min_nodes} of {self.clients}"
            )
        if sites and self.clients not in (0, len(sites)):
            raise UsageError(f"sites names {len(sites)} sites, but clients is {self.clients}")
        if self.fraction_train == 0:
            raise UsageError("fraction-train must be above 0")

    def clients_in_round(self, clients: int = 0) -> int:
        """Return the number of clients that train in a round, out of `clients` (default: all)."""
        return max(int((clients or self.clients) * self.fraction_train), 1)

    def but(self, **values: Any) -> Self:
        """Return the same options with these values, each named as in its group."""
        own: dict[str, Any] = {}
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group = groups_of_options().get(name)
            if group:
                grouped.setdefault(group, {})[name] = value
            else:
                own[name] = value
        for group, changes in grouped.items():
            own[group] = replace(getattr(self, group), **changes)
        return replace(self, **own)

    def get(self, name: str) -> Any:
        """Return the value of an option, whatever its group."""
        group = groups_of_options().get(name)
        return getattr(getattr(self, group) if group else self, name)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Read kebab-case keys whose values are of the right type or text."""
        known = shared_options()
        others = sorted(set(values) - set(known))
        if others:
            raise UsageError(unknown_option(others[0], known))
        read = {known[key].name: known[key].read(value) for key, value in values.items()}
        return cls().but(**read)

    def to_mapping(self) -> dict[str, Value]:
        """Return the options by their kebab-case keys, as they are written in files."""
        options = shared_options().values()
        return {wire_key(option.name): as_value(self.get(option.name)) for option in options}


@cache
def shared_options() -> Mapping[str, Option]:
    """Return the options that all methods share, by key."""
    options = dict[str, Option]()
    for own in options_by_group().values():
        options |= own
    return MappingProxyType(options)


@cache
def options_by_group() -> Mapping[str, Mapping[str, Option]]:
    """Return the shared options by the name of their group, by key; `run` has those of none."""
    named = {name: options_of(group) for name, group in GROUPS.items()}
    return MappingProxyType({"run": options_of(Config), **named})


@cache
def groups_of_options() -> Mapping[str, str]:
    """Return the name of the group that holds an option, by the option's name."""
    names = {}
    for name, group in GROUPS.items():
        for option in options_of(group).values():
            names[option.name] = name
    return MappingProxyType(names)
