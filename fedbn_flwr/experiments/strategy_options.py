"""The options of strategies: the keyword arguments of their constructors, with the help that stands beside each."""

import inspect
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from fedbn_flwr.experiments.config import Config, UsageError, is_written
from fedbn_flwr.strategies import REGISTRY, BaseStrategy
from fedbn_flwr.wire import wire_key

#: constructor arguments that follow from the shared options
SHARED = ("lr_schedule", "seed", "patience", "exchange_timeout", "evaluate_every")
#: keys that mean something else on the command line
_TAKEN = {*Config().to_mapping(), "engine", "verbose", "methods", "seeds", "lr-grid", "batches", "help"}


class StrategyOption(NamedTuple):
    """A keyword argument of a strategy's constructor, written `name: Annotated[kind, "help"] = default`."""

    name: str
    #: a type or a union of types
    kind: Any
    default: Any
    help: str


@cache
def own_options(strategy: type[BaseStrategy]) -> Mapping[str, StrategyOption]:
    """Return the options that a strategy's constructors declare, by kebab-case key."""
    options: dict[str, StrategyOption] = {}
    for owner in strategy.__mro__:
        if not issubclass(owner, BaseStrategy):
            continue
        for key, option in _declared(owner).items():
            if option.name in (*SHARED, *strategy.replaced):
                continue
            # a subclass may give an option another default without repeating its help
            nearest = options.setdefault(key, option)
            options[key] = nearest._replace(help=nearest.help or option.help)
    return MappingProxyType(options)


def all_options() -> dict[str, StrategyOption]:
    """Return the options of all strategies; where several share one, as the first of them has it."""
    options: dict[str, StrategyOption] = {}
    for name, strategy in REGISTRY.items():
        for key, option in own_options(strategy).items():
            if key in _TAKEN:
                raise UsageError(f"strategy {name!r}: the option {key!r} of its constructor is one of all commands")
            options.setdefault(key, option)
    return options


def owners(key: str) -> list[str]:
    """Return the names of the strategies that have an option."""
    return [name for name, strategy in REGISTRY.items() if key in own_options(strategy)]


def _declared(owner: type[BaseStrategy]) -> dict[str, StrategyOption]:
    """Return the keyword arguments of one class's constructor that can be written, by kebab-case key."""
    hints = get_type_hints(owner.__init__, include_extras=True)
    options = [
        _option(name, hints.get(name, str), parameter.default)
        for name, parameter in inspect.signature(owner.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    return {wire_key(option.name): option for option in options if is_written(option.kind)}


def _option(name: str, hint: Any, default: Any) -> StrategyOption:
    if get_origin(hint) is not Annotated:
        return StrategyOption(name, hint, default, "")
    kind, *notes = get_args(hint)
    return StrategyOption(name, kind, default, " ".join(note for note in notes if isinstance(note, str)))
