"""The networks of the papers, and building any model by name: same seed, same weights."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from textwrap import shorten
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedbn_flwr import norm as norms
from fedbn_flwr.plugins import MissingExtraError, add, extra, import_function
from fedbn_flwr.randomness import derive

__all__ = ["MODELS", "build", "register_model"]

#: makes a model from the number of classes, the number of channels and the side of the images
Make = Callable[[int, int, int], nn.Module]
_OFFERED = ("num_classes", "in_channels", "image_size")


@dataclass(frozen=True)
class Entry:
    """A registered model: the function that makes it, the square images that it can take, and what it is for."""

    make: Make
    smallest: int
    largest: int | None = None
    task: str = "classification"


#: the models by name; `register_model` adds one
MODELS: dict[str, Entry] = {}

M = TypeVar("M", bound=Make)


def register_model(
    name: str, *, smallest: int = 1, largest: int | None = None, task: str = "classification"
) -> Callable[[M], M]:
    """Register a function that makes a model, under the name that `--model` takes; used as a decorator.

        @register_model("tiny", smallest=8)
        def tiny(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

    `smallest` and `largest` bound the side of the square images that the model can take. `task` is the task of data
    (`Data.task`) that the model is for. A name that another model has is a ValueError.
    """

    def register(make: M) -> M:
        add(MODELS, "model", name, Entry(make, smallest, largest, task), source=lambda entry: entry.make)
        return make

    return register


def build(
    name: str,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    norm: str = "bn",
    seed: int = 0,
    init_from: str | Path | None = None,
    groups: int = 2,
    normalize_features: bool = False,
    **norm_options: object,
) -> nn.Module:
    """Build a model of the registry, or any other given as "package.module:function".

    Its weights are a function of the seed alone, and torch's own generator is left as it was; `init_from`, a
    safetensors file or a torch state dict, replaces them. `norm`, `groups` and `norm_options` are those of
    `fedbn_flwr.norm.replace`; `normalize_features` lets the classifier take normalized features.
    """
    make = _maker(name, image_size)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator: torch.manual_seed would reseed the accelerators' too.
        torch.default_generator.manual_seed(derive(seed, "weights"))
        model = make(num_classes, in_channels, image_size)
        model = norms.replace(model, norm, groups=groups, **norm_options)
        model = norms.normalize_features(model) if normalize_features else model
    if init_from is not None:
        _load_weights(model, Path(init_from))
    return model


def _maker(name: str, image_size: int) -> Make:
    if name not in MODELS:
        return _custom_model(name)
    entry = MODELS[name]
    if image_size < entry.smallest or (entry.largest is not None and image_size > entry.largest):
        able = f"those of {entry.smallest}x{entry.smallest} {'only' if entry.largest else 'and more'}"
        raise ValueError(f"model {name!r} cannot take {image_size}x{image_size} images; it takes {able}")
    return entry.make


def _custom_model(spec: str) -> Make:
    """Return the function or class that `spec` names, called with those of the three arguments it accepts."""
    factory = import_function("model", spec, MODELS)
    try:
        signature = inspect.signature(factory)
        # behind **options, model libraries (torchvision, timm) know the number of classes, but not the others
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        accepted = {*signature.parameters, *(["num_classes"] if open_ended else [])} & set(_OFFERED)
        signature.bind(**dict.fromkeys(accepted))
    except (TypeError, ValueError) as error:
        raise ValueError(f"model {spec!r} must need no argument other than {', '.join(_OFFERED)}: {error}") from error

    def make(*values: int) -> nn.Module:
        model = factory(**{name: value for name, value in zip(_OFFERED, values, strict=True) if name in accepted})
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {spec!r} returned a {type(model).__name__}, not a torch.nn.Module")
        return model

    return make


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load a file of weights, which must fit the model name by name."""
    state = read_weights(path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {shorten(str(error), 300)}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file or a torch state dict; a ValueError names a file that is neither."""
    if not path.is_file():
        raise ValueError(f"no weights: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            with extra("models"):
                from safetensors.torch import load_file
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except MissingExtraError:
        raise
    except Exception as error:  # torch runs the file as a program, and in one that is none anything can go wrong
        raise ValueError(f"{path} is neither safetensors nor a torch state dict: {shorten(str(error), 300)}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ValueError(f"{path} does not hold a state dict (names and tensors)")
    return state


# every file of this folder registers its models when it is imported
for _module in iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
