"""Files of weights: read, and loaded into a model whose head may have another number of classes."""

import zipfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.norm import bn_layers
from fedbn_flwr.plugins import MissingExtraError, extra, warn_once

#: a file may have so many times the entries and bytes of the model, and so many more
TIMES = 16
FEW = 1000
SMALL = 2**26
#: under which published files hold the state dict, beside what else they hold
NESTED = ("state_dict", "model", "model_state_dict")


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str, num_classes: int
) -> None:
    """Load weights, which must fit name by name, into a model; a ValueError says what does not fit.

    A head of another number of classes starts at random. A log line names the entries that were
    left out.
    """
    own = model.state_dict()
    if not own.keys() & state.keys():
        # of what the model was a part of, such as `DataParallel`, a compiled or a Lightning module
        first = next(iter(own), "")
        named = next((name for name in state if name.endswith(f".{first}")), first)
        holder = named.removesuffix(first)
        state = {name.removeprefix(holder): value for name, value in state.items()}
    head = [
        name
        for name, value in own.items()
        if name in state and value.shape[:1] == (num_classes,) != state[name].shape[:1]
        if value.shape[1:] == state[name].shape[1:]
    ]
    try:
        model.load_state_dict({**state, **{name: own[name] for name in head}})
    except RuntimeError as error:
        raise ValueError(f"{source} does not fit the model: {shorten(str(error), 300)}") from error
    for layer in map(model.get_submodule, {name.rpartition(".")[0] for name in head}):
        # what libraries start a head with is meant for all layers that start at random: timm's
        # gives a loss of 16
        getattr(layer, "reset_parameters", tuple)()
    for name, layer in bn_layers(model).items():
        if layer.running_var is not None and bool((layer.running_var < 0).any()):
            raise ValueError(f"{source}: entry '{name}.running_var' has a variance below 0")
    if head:
        warn_once(f"{source} has another number of classes: {', '.join(head)} start at random")


def read_weights(path: Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Read a safetensors file or a torch state dict, bare or nested.

    A ValueError names a file that is neither.

    A file that is much larger than the state of the `model` is refused before it is unpacked, and a
    value that is not a finite number by its entry.
    """
    if not path.is_file():
        raise ValueError(f"no weights: there is no file {path}")
    limit = Limit.of(model)
    try:
        read = _read_safetensors if path.suffix == ".safetensors" else _read_torch
        state: Any = read(path, limit)
    except (MissingExtraError, TooLargeError):
        raise
    except Exception as error:
        # torch runs the file as a program, and in one that is none anything can go wrong
        raise ValueError(
            f"{path} is neither safetensors nor a torch state dict: {shorten(str(error), 300)}"
        ) from error
    if isinstance(state, dict):
        state = next((state[key] for key in NESTED if isinstance(state.get(key), dict)), state)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ValueError(f"{path} does not hold a state dict (names and tensors)")
    limit.check(path, len(state), 0)
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{path}: entry {name!r} has a value that is not a finite number")
    return state


class TooLargeError(ValueError):
    """A file has far more entries or bytes than a model."""


@dataclass(frozen=True)
class Limit:
    """The most entries and bytes that a file of weights may have."""

    entries: float = inf
    size: float = inf

    @classmethod
    def of(cls, model: nn.Module | None) -> Self:
        """Return the limit for a model: beside its state a file may have an optimizer's, and
        averages of weights.
        """
        if model is None:
            return cls()
        values = [
            value
            for value in model.state_dict().values()
            if isinstance(value, Tensor) and not is_lazy(value)
        ]
        size = sum(value.numel() * value.element_size() for value in values)
        return cls(TIMES * len(values) + FEW, TIMES * size + SMALL)

    def check(self, path: Path, entries: int, size: int) -> None:
        """Refuse a file with more."""
        if entries > self.entries:
            raise TooLargeError(
                f"{path} has {entries:,} entries, and at most {self.entries:,} are read for this "
                "model"
            )
        if size > self.size:
            raise TooLargeError(
                f"{path} unpacks to {size:,} bytes, and at most {self.size:,} are read for this "
                "model"
            )


def _read_safetensors(path: Path, limit: Limit) -> dict[str, Tensor]:
    with extra("models"):
        from safetensors import safe_open
    with safe_open(str(path), "pt") as file:
        names = list(file.keys())
        limit.check(path, len(names), path.stat().st_size)
        return {name: file.get_tensor(name) for name in names}


def _read_torch(path: Path, limit: Limit) -> object:
    size = path.stat().st_size
    entries = 0
    if zipfile.is_zipfile(path):  # which may be compressed
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
        size = sum(member.file_size for member in members)
        entries = len(members)
    limit.check(path, entries, size)
    others = {Namespace} - {*torch.serialization.get_safe_globals()}
    # the options of scripts lie beside the weights
    with torch.serialization.safe_globals([*others]):
        return torch.load(path, map_location="cpu", weights_only=True)
