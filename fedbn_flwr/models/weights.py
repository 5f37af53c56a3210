"""Files of weights: read, and loaded into a model whose head may have another number of classes."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.plugins import MissingExtraError, extra, warn_once

#: under which published files hold the state dict, beside what else they hold
NESTED = ("state_dict", "model", "model_state_dict")


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: str, num_classes: int) -> None:
    """Load weights, which must fit name by name, into a model; a head of another number of classes starts at random.

    A log line names the entries that were left out. A ValueError says what does not fit.
    """
    own = model.state_dict()
    if not own.keys() & state.keys():  # the names of `DataParallel`
        state = {name.removeprefix("module."): value for name, value in state.items()}
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
        # what libraries start a head with is meant for all layers that start at random: timm's gives a loss of 16
        getattr(layer, "reset_parameters", tuple)()
    if head:
        warn_once(f"{source} has another number of classes: {', '.join(head)} start at random")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file or a torch state dict, bare or nested; a ValueError names a file that is neither."""
    if not path.is_file():
        raise ValueError(f"no weights: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            with extra("models"):
                from safetensors.torch import load_file
            return load_file(path)
        others = {Namespace} - {*torch.serialization.get_safe_globals()}
        with torch.serialization.safe_globals([*others]):  # the options of scripts lie beside the weights
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except MissingExtraError:
        raise
    except Exception as error:  # torch runs the file as a program, and in one that is none anything can go wrong
        raise ValueError(f"{path} is neither safetensors nor a torch state dict: {shorten(str(error), 300)}") from error
    if isinstance(state, dict):
        state = next((state[key] for key in NESTED if isinstance(state.get(key), dict)), state)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ValueError(f"{path} does not hold a state dict (names and tensors)")
    return state
