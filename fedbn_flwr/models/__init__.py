"""The networks of the papers, and building any model by name: same seed, same weights."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr import norm as norms
from fedbn_flwr.models.libraries import LIBRARIES, make_published, published
from fedbn_flwr.models.weights import load_weights, read_weights
from fedbn_flwr.plugins import Own, add, described, import_function
from fedbn_flwr.plugins.options import Option, Range
from fedbn_flwr.randomness import derive

__all__ = ["LIBRARIES", "MODELS", "build", "published", "read_weights", "register_model"]

#: in place of a file of weights: those that a library publishes with its network
PRETRAINED = "pretrained"
#: stands for the parameters of the last layer that has any
HEAD = "head"

_FACTOR = Option("trainable: a factor of the rate", float, 1.0, range=Range(0))

#: makes a model from the number of classes, the number of channels and the side of the images
Make = Callable[[int, int, int], nn.Module]
_OFFERED = ("num_classes", "in_channels", "image_size")


@dataclass(frozen=True)
class KnownModel:
    """A registered model: the function that makes it, the square images that it can take, and what
    it is for.
    """

    make: Make
    smallest: int
    largest: int | None = None
    task: str = "classification"


#: the models by name; `register_model` adds one
MODELS: dict[str, KnownModel] = {}

M = TypeVar("M", bound=Make)


def register_model(
    name: str, *, smallest: int = 1, largest: int | None = None, task: str = "classification"
) -> Callable[[M], M]:
    """Register a function that makes a model, under the name that `--model` takes.

    Used as a decorator.

        @register_model("tiny", smallest=8)
        def tiny(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

    `smallest` and `largest` bound the side of the square images that the model can take. `task` is
    the task of data (`Data.task`) that the model is for. A name that another model has is a
    ValueError.
    """

    def register(make: M) -> M:
        add(
            MODELS,
            "model",
            name,
            KnownModel(make, smallest, largest, task),
            source=lambda entry: entry.make,
        )
        return make

    return register


def build(
    name: str | Own,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    norm: str = "bn",
    seed: int = 0,
    init_from: str | Path | None = None,
    groups: int = 2,
    normalize_features: bool = False,
    trainable: Sequence[str] = (),
    **norm_options: object,
) -> nn.Module:
    """Build a model of the registry, `timm:NAME`, `torchvision:NAME`, or any other as
    "package.module:function".

    Its weights are a function of the seed alone, and torch's own generator is left as it was.
    `init_from`, a safetensors file or a torch state dict, replaces them, or `pretrained`, the
    library's own. `norm`, `groups` and `norm_options` are those of `fedbn_flwr.norm.replace`.
    `normalize_features` lets the classifier take normalized features. `trainable` has patterns of
    the parameters that learn, and at which part of the rate: the model's `rate_factors`.
    """
    make = _maker(name, image_size, pretrained=init_from == PRETRAINED)
    weights = None
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator: torch.manual_seed would reseed the accelerators' too.
        torch.default_generator.manual_seed(derive(seed, "weights"))
        model = make(num_classes, in_channels, image_size)
        check_entries(name, model)
        if init_from not in (None, PRETRAINED):
            weights = read_weights(Path(str(init_from)).expanduser(), model)
            # said below, if they do not fit the model as it is in the end either
            with suppress(ValueError):
                load_weights(model, weights, str(init_from), num_classes)
                weights = None
        model = norms.replace(model, norm, groups=groups, **norm_options)
        if normalize_features:
            model = norms.normalize_features(model)
        if weights is not None:
            load_weights(model, weights, str(init_from), num_classes)
    _choose(model, trainable)
    return model


def check_entries(name: str | Own, model: nn.Module) -> None:
    """Refuse a model of which an entry has no shape or no values yet, or is nothing that a message
    can hold, or of which copies would train in another way.
    """
    parameters = dict(model.named_parameters())
    state_dict = model.state_dict()
    for entry, value in (*parameters.items(), *model.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"model {name!r} has lazy layers ({entry!r} has no shape yet): call it once, on "
                "inputs like the data's, in the function that makes it"
            )
        if value.is_meta:
            raise ValueError(f"model {name!r} has no values yet ({entry!r} is on the meta device)")
    for entry, state in state_dict.items():
        if not isinstance(state, Tensor):
            raise ValueError(
                f"model {name!r} has an entry that is no tensor, and cannot be averaged: "
                f"{entry!r}, a {type(state).__name__}"
            )
        try:
            torch.empty(0, dtype=state.dtype).numpy()
        except TypeError as error:
            raise ValueError(
                f"model {name!r} has an entry of a type that messages lack: {entry!r}, "
                f"{state.dtype}: return model.float(), and train with precision=bf16"
            ) from error
    for entry, parameter in parameters.items():
        if parameter.requires_grad and entry not in state_dict:
            raise ValueError(f"model {name!r} has no parameter {entry!r} in its state_dict")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"model {name!r} has a hook on its parameter {entry!r}, which its copies would "
                "lack: change gradients in a forward, or give parameters other learning rates"
            )


def _choose(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let parameters learn at the factors of the rate that patterns give: 1, with `=NUMBER` the
    number, with `!` 0.

    If several match a parameter, 0 counts, else the last. Parameters that none matches learn, too,
    unless a pattern is a name alone. A ValueError names a pattern that matches nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    given = [
        (f"{text[1:]}=0" if text.startswith("!") else text).partition("=") for text in patterns
    ]
    factors = dict.fromkeys(names, float(all(equals for _, equals, _ in given)))
    read = [(asked, _FACTOR.read(number) if equals else 1.0) for asked, equals, number in given]
    for asked, factor in sorted(read, key=lambda pattern: pattern[1] == 0):
        glob = asked
        if asked == HEAD:
            glob = f"{names[-1].rpartition('.')[0]}.*"
        matching = [name for name in names if fnmatchcase(name, glob)]
        if not matching:
            raise ValueError(
                f"trainable: no parameter matches {asked!r}; there are {HEAD}, "
                f"{', '.join(names[:3])}, ..."
            )
        factors |= dict.fromkeys(matching, factor)
    for name, parameter in model.named_parameters():
        if not factors[name]:
            parameter.requires_grad_(False)
    cast(Any, model).rate_factors = factors


def _maker(name: str | Own, image_size: int, pretrained: bool) -> Make:
    found = published(name)
    if found:
        return partial(make_published, found, pretrained)
    if pretrained:
        raise ValueError(
            f"init-from={PRETRAINED} is for models such as timm:resnet18 or torchvision:resnet18, "
            f"not {name}"
        )
    if isinstance(name, Own) or name not in MODELS:
        return _custom_model(name)
    entry = MODELS[name]
    if image_size < entry.smallest or (entry.largest is not None and image_size > entry.largest):
        more = "only" if entry.largest else "and more"
        able = f"those of {entry.smallest}x{entry.smallest} {more}"
        raise ValueError(
            f"model {name!r} cannot take {image_size}x{image_size} images; it takes {able}"
        )
    return entry.make


def _custom_model(spec: str | Own) -> Make:
    """Return the function or class that `spec` names, called with those of the three arguments it
    accepts.
    """
    of_libraries = [f"{library}:NAME" for library in LIBRARIES]
    factory = import_function("model", spec, [*MODELS, *of_libraries])
    try:
        signature = inspect.signature(factory)
        # behind **options, model libraries (torchvision, timm) know the number of classes, but not
        # the others
        open_ended = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
        )
        accepted = {*signature.parameters, *(["num_classes"] if open_ended else [])} & set(_OFFERED)
        signature.bind(**dict.fromkeys(accepted))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model {spec!r} must need no argument other than {', '.join(_OFFERED)}: {error}"
        ) from error

    def make(*values: int) -> nn.Module:
        offered = zip(_OFFERED, values, strict=True)
        try:
            model = factory(**{name: value for name, value in offered if name in accepted})
        except Exception as error:  # of whatever kind a user's function raises
            raise ValueError(f"model {spec!r} cannot be made: {described(error)}") from error
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model {spec!r} returned a {type(model).__name__}, not a torch.nn.Module"
            )
        return model

    return make


# every file of this folder registers its models when it is imported
for _module in iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
