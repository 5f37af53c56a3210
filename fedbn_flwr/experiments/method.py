"""Methods: a strategy, its normalizer and its options, written `STRATEGY[+NORM][:key=value]...`."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from fedbn_flwr.experiments.config import shared_options
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import (
    Own,
    did_you_mean,
    same_definition,
)
from fedbn_flwr.plugins.options import (
    Option,
    UsageError,
    Value,
    as_given,
    option_key,
    read_pairs,
)
from fedbn_flwr.server.constructor_options import constructor_options
from fedbn_flwr.strategies import REGISTRY, BaseStrategy

#: a name with options, a strategy, or a strategy's class
Method = str | BaseStrategy | type[BaseStrategy]
#: constructor arguments of strategies that follow from the shared options
SHARED = ("lr_schedule", "seed", "patience", "exchange_timeout", "evaluate_every")


class Parsed(NamedTuple):
    """A method, taken apart."""

    name: str
    strategy: type[BaseStrategy]
    #: None where the method names none
    norm: str | None
    #: by key, text or values
    options: Mapping[str, Any]


@cache
def own_options(strategy: type[BaseStrategy]) -> Mapping[str, Option]:
    """Return the options that a strategy's constructors declare, by kebab-case key."""
    options = constructor_options(strategy)
    return MappingProxyType(
        {option_key(name): each for name, each in options.items() if name not in SHARED}
    )


def all_options() -> dict[str, Option]:
    """Return the options of all strategies; where several share one, as the first of them has
    it.
    """
    options: dict[str, Option] = {}
    for name, strategy in REGISTRY.items():
        refuse_taken(name, strategy)
        for key, option in own_options(strategy).items():
            options.setdefault(key, option)
    return options


def owners(key: str) -> list[str]:
    """Return the names of the strategies that have an option."""
    return [name for name, strategy in REGISTRY.items() if key in own_options(strategy)]


def refuse_ignored(methods: Sequence[Parsed], keys: Iterable[str]) -> None:
    """Refuse an option of single strategies that none of the methods has.

    In a comparison, one that some of them have is for these.
    """
    for key in map(option_key, keys):
        names = owners(key)
        if names and not any(key in own_options(method.strategy) for method in methods):
            ignoring = ", ".join(method.name for method in methods)
            raise UsageError(
                f"{key} is an option of {', '.join(names)}; {ignoring} would ignore it"
            )


def forms_of(key: str) -> dict[Option, list[str]]:
    """Return an option as strategies have it, with their names: they may differ in its default and
    its help.
    """
    forms = dict[Option, list[str]]()
    for name in owners(key):
        forms.setdefault(own_options(REGISTRY[name])[key], []).append(name)
    return forms


def parse(text: str | Own) -> Parsed:
    """Split `STRATEGY[+NORM][:key=value]...`; of a user's own strategy, return what is known."""
    if isinstance(text, Own):
        method: Parsed = text.target
        return method
    head, *items = text.split(":")
    strategy, plus, norm = head.partition("+")
    if strategy not in REGISTRY:
        raise UsageError(f"unknown strategy {strategy!r}; {did_you_mean(strategy, REGISTRY)}")
    if plus and norm not in NORMS:
        raise UsageError(f"unknown normalizer {norm!r}; {did_you_mean(norm, NORMS)}")
    options = dict(read_pairs(f"method {text!r}", _rejoined(items)))
    return Parsed(strategy, REGISTRY[strategy], norm if plus else None, options)


def method_of(given: Method) -> str | Own:
    """Return a method as text, or a strategy of a user's own with its name.

    A strategy stands for its class and the arguments that it was made with: each run makes one of
    its own.
    """
    if isinstance(given, str):
        return given
    strategy = given if isinstance(given, type) else type(given)
    if not issubclass(strategy, BaseStrategy):
        raise UsageError(
            "a method must be a name, or a strategy of fedbn_flwr.strategies or a subclass of "
            f"one, got {strategy.__module__}.{strategy.__qualname__}"
        )
    options = {} if isinstance(given, type) else _arguments(given)
    name = name_of(strategy)
    method: str | Own = Own(name, Parsed(name, strategy, None, {}))
    for key, value in options.items():
        method = with_option(method, key, value)
    return method


def with_option(method: str | Own, key: str, value: Value) -> str | Own:
    """Return a method with one option more."""
    written = str(value).lower() if isinstance(value, bool) else value
    text = f"{method}:{key}={written}"
    if isinstance(method, str):
        return text
    parsed = parse(method)
    return Own(text, parsed._replace(options={**parsed.options, key: value}))


def name_of(strategy: type[BaseStrategy]) -> str:
    """Return the registered name of a strategy, or one made of its class's name."""
    for name, known in REGISTRY.items():
        if known is strategy:
            return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+", "-", strategy.__name__)
    name = words.strip("-").lower()
    if name in REGISTRY and not same_definition(REGISTRY[name], strategy):
        raise UsageError(
            f"strategy {name!r} is there already; @register_strategy gives the class "
            f"{strategy.__name__} another name"
        )
    refuse_taken(name, strategy)
    return name


def refuse_taken(name: str, strategy: type[BaseStrategy]) -> None:
    """Refuse a strategy whose constructor has an option of all commands."""
    for key in own_options(strategy):
        if key in shared_options():
            raise UsageError(
                f"strategy {name!r}: the option {key!r} of its constructor is one of all commands"
            )


def _arguments(strategy: BaseStrategy) -> dict[str, Value]:
    """Return the options that a strategy was made with, by key."""
    positional, named = strategy.made_with
    signature = inspect.signature(type(strategy))
    given = dict[str, Any]()
    for name, value in signature.bind(*positional, **named).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    known = own_options(type(strategy))
    options = dict[str, Value]()
    for name, value in given.items():
        key = option_key(name)
        value = as_given(value)
        if value is None and key in known and known[key].default is None:
            continue
        if not isinstance(value, bool | int | float | str):
            raise UsageError(
                f"{type(strategy).__name__}: an experiment cannot write down {name}={value!r}; a "
                "subclass can set it in its constructor"
            )
        options[key] = value
    return options


def split_methods(text: str) -> list[str]:
    """Split a list of methods at its commas, but not at those inside a value
    (`lr-schedule=0.1@0.5,=0.001@freeze`).

    A strategy's name neither starts with a digit nor holds an equals sign or an `@`.
    """
    methods: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if methods and (piece[0].isdigit() or {"=", "@"} & set(piece.partition(":")[0])):
            methods[-1] += f",{piece}"
        else:
            methods.append(piece)
    return methods


def _rejoined(items: list[str]) -> list[str]:
    """Values may hold colons themselves (`partition=classes:2`): a piece without `=` belongs to the
    one before.
    """
    joined: list[str] = []
    for item in items:
        if joined and "=" not in item:
            joined[-1] += f":{item}"
        else:
            joined.append(item)
    return joined
