"""Options of strategies' constructors: their types and ranges, and the errors for what no
constructor takes.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from flwr.serverapp.strategy import FedAvg

from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import Option, options_of

MomentumKind = Literal["none", "local", "global"]
StatisticsKind = Literal["running", "exact", "own"]
OptimizerKind = Literal["none", "adam", "yogi", "adagrad", "momentum"]


@cache
def constructor_options(strategy: Any) -> Mapping[str, Option]:
    """Return the options of a strategy's constructors, by name, but for those of Flower's."""
    options: dict[str, Option] = {}
    for owner in strategy.__mro__[: strategy.__mro__.index(FedAvg)]:
        if "__init__" not in vars(owner):
            continue
        for option in options_of(vars(owner)["__init__"]).values():
            # a subclass may give an option another default without repeating its help
            nearest = options.setdefault(option.name, option)
            options[option.name] = nearest._replace(
                help=nearest.help or option.help, range=nearest.range or option.range
            )
    return MappingProxyType(
        {name: option for name, option in options.items() if name not in strategy.replaced}
    )


def check_constructor(strategy: Any, given: Mapping[str, Any]) -> None:
    """Raise for a keyword that no constructor takes, a TypeError, or a value that it does not take,
    a ValueError.
    """
    constructors = [
        vars(parent)["__init__"] for parent in strategy.__mro__[:-1] if "__init__" in vars(parent)
    ]
    parameters = [inspect.signature(constructor).parameters for constructor in constructors]
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = {
        name for each in parameters for name, item in each.items() if item.kind not in variadic
    } - {"self"}
    known -= {*strategy.replaced}
    options = constructor_options(strategy)
    for name, value in given.items():
        if name not in known:
            raise TypeError(
                f"{strategy.__name__} has no option {name!r}; {did_you_mean(name, sorted(known))}"
            )
        option = options.get(name)
        # one that says nothing of what it takes, as a user's own may, takes anything
        if option and value is not None and (option.help or option.range):
            option.check(value)
