"""What strategies' constructors take, as types: `**options: Unpack[BaseOptions]` lets a type checker see it all."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from flwr.app import MetricRecord, RecordDict

MomentumKind = Literal["none", "local", "global"]
OptimizerKind = Literal["none", "adam", "yogi", "adagrad", "momentum"]
MeanOfMetrics = Callable[[list[RecordDict], str], MetricRecord]


class FlowerOptions(TypedDict, total=False):
    """The arguments of Flower's FedAvg."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MeanOfMetrics | None
    evaluate_metrics_aggr_fn: MeanOfMetrics | None


class BaseOptions(FlowerOptions, total=False):
    """Those of Flower's FedAvg, and of `BaseStrategy`."""

    lr_schedule: str
    seed: int
    patience: float
    exchange_timeout: float
    evaluate_every: int
    momentum_state: MomentumKind
    server_optimizer: OptimizerKind
    server_lr: float | None


def refuse_unknown(strategy: type, given: Mapping[str, Any] | Iterable[str]) -> None:
    """Raise a TypeError for a keyword that no constructor of the strategy takes, with the one that was meant."""
    constructors = [vars(parent)["__init__"] for parent in strategy.__mro__[:-1] if "__init__" in vars(parent)]
    parameters = [inspect.signature(constructor).parameters for constructor in constructors]
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = {name for each in parameters for name, item in each.items() if item.kind not in variadic} - {"self"}
    flowers = set(FlowerOptions.__annotations__)
    for name in given:
        if name not in flowers:
            meant = get_close_matches(name, known, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"known: {', '.join(sorted(known))}"
            raise TypeError(f"{strategy.__name__} has no option {name!r}; {hint}")
