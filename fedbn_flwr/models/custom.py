"""A user's own model: a function or class, or its name as "package.module:function"."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedbn_flwr.plugins import Named


def custom_model(spec: str) -> Callable[[int, int, int], nn.Module]:
    """The function or class that `spec` names, called with those of the three arguments it accepts."""
    factory = spec.target if isinstance(spec, Named) else _find(spec)

    def make(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
        offered = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
        model = factory(**_accepted(factory, offered))
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {spec!r} returned a {type(model).__name__}, not a torch.nn.Module")
        return model

    return make


def _find(spec: str) -> Callable[..., Any]:
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"model {spec!r}: cannot import {module_name!r}: {error}") from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise ValueError(f"model {spec!r}: module {module_name!r} has no function {function_name!r}")
    return factory  # type: ignore[no-any-return]


def _accepted(factory: Callable[..., Any], offered: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(factory).parameters
    # Behind **options, model libraries (torchvision, timm) know the number of classes, but not the others.
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = {*parameters, "num_classes"} if open_ended else set(parameters)
    return {name: value for name, value in offered.items() if name in names}
