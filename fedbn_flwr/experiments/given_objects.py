"""Objects that users give in place of names: strategies, models and data become text that holds them."""

import inspect
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import nn

from fedbn_flwr.data.own_data import OwnData, digest_of, fingerprint_of, own_data
from fedbn_flwr.experiments.method import all_options, own_options, parse
from fedbn_flwr.plugins import Named, fingerprint
from fedbn_flwr.plugins.options import UsageError, as_given, as_value, option_key
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, register_strategy

#: a name with options, a strategy, or a strategy's class
Method = str | BaseStrategy | type[BaseStrategy]
#: a name, a function or class that makes a model, or a model
Model = str | Callable[..., nn.Module] | nn.Module


def method_of(given: Method) -> str:
    """Return a method as text; the class of a strategy is registered under its name, unless it has one already.

    A strategy stands for its class and the arguments that it was made with: each run makes one of its own.
    """
    if isinstance(given, str):
        return given
    strategy = given if isinstance(given, type) else type(given)
    if not issubclass(strategy, BaseStrategy):
        raise UsageError(
            "a method must be a name, or a strategy of fedbn_flwr.strategies or a subclass of one, got "
            f"{strategy.__module__}.{strategy.__qualname__}"
        )
    name = _registered(strategy)
    pairs = {} if isinstance(given, type) else _arguments(given)
    text = ":".join([name, *(f"{key}={value}" for key, value in pairs.items())])
    if parse(text).options != pairs:
        raise UsageError(f"{strategy.__name__}: an option's value cannot be written in a method, got {text!r}")
    return text


def model_of(given: Model) -> str:
    """Return a model's name, which holds the function that makes it if it is none of the registered ones."""
    if isinstance(given, str):
        return given
    if isinstance(given, nn.Module):
        held = deepcopy(given)
        state = held.state_dict()
        digest = digest_of([fingerprint(type(held)), held, *state, *state.values()])
        return Named(type(held).__name__, lambda: deepcopy(held), digest)
    if not callable(given):
        raise UsageError(
            "model must be a name, a function or class that makes a torch.nn.Module, or a torch.nn.Module, got "
            f"{type(given).__name__}"
        )
    return Named(getattr(getattr(given, "func", given), "__name__", "model"), given, fingerprint(given))


def dataset_of(given: str | OwnData) -> str:
    """Return a data set's name, which holds the data if they are none of the registered ones."""
    if isinstance(given, str):
        return given
    try:
        data = own_data(given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Named(data.name, data, fingerprint_of(data))


def _registered(strategy: type[BaseStrategy]) -> str:
    for name, known in REGISTRY.items():
        if known is strategy:
            return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+", "-", strategy.__name__)
    name = words.strip("-").lower()
    before = REGISTRY.get(name)
    try:
        register_strategy(name)(strategy)
        all_options()
    except ValueError as error:
        REGISTRY.pop(name) if before is None else REGISTRY.update({name: before})
        raise UsageError(f"{error}; @register_strategy gives the class {strategy.__name__} another name") from error
    return name


def _arguments(strategy: BaseStrategy) -> dict[str, str]:
    """Return the options that a strategy was made with, as they are written in a method."""
    (positional, named), signature = strategy.made_with, inspect.signature(type(strategy))
    given = dict[str, Any]()
    for name, value in signature.bind(*positional, **named).arguments.items():
        given |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    known, texts = own_options(type(strategy)), dict[str, str]()
    for name, value in given.items():
        key, value = option_key(name), as_given(value)
        if value is None and key in known and known[key].default is None:
            continue
        if not isinstance(value, bool | int | float | str):
            raise UsageError(
                f"{type(strategy).__name__}: an experiment cannot write down {name}={value!r}; a subclass can set it "
                "in its constructor"
            )
        texts[key] = str(as_value(value)).lower() if isinstance(value, bool) else str(as_value(value))
    return texts
