"""Options of strategies' constructors: their types, and the error for a name that no constructor takes."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from flwr.serverapp.strategy import FedAvg

from fedbn_flwr.plugins import did_you_mean

MomentumKind = Literal["none", "local", "global"]
OptimizerKind = Literal["none", "adam", "yogi", "adagrad", "momentum"]


def refuse_unknown(strategy: type, given: Mapping[str, Any] | Iterable[str]) -> None:
    """Raise a TypeError for a keyword that no constructor of the strategy takes, with the one that was meant."""
    constructors = [vars(parent)["__init__"] for parent in strategy.__mro__[:-1] if "__init__" in vars(parent)]
    parameters = [inspect.signature(constructor).parameters for constructor in constructors]
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = {name for each in parameters for name, item in each.items() if item.kind not in variadic} - {"self"}
    flowers = inspect.signature(FedAvg).parameters
    for name in given:
        if name not in flowers:
            raise TypeError(f"{strategy.__name__} has no option {name!r}; {did_you_mean(name, sorted(known))}")
