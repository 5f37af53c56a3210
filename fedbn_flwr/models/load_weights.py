"""Starting a model from weights in a file."""

import pickle
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn

from fedbn_flwr.plugins import extra

#: characters of torch's list of mismatches
MOST_TOLD = 300


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file or a torch state dict, which must fit the model name by name."""
    state = _read(path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {shorten(str(error), MOST_TOLD)}") from error


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"no weights to start from: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (ValueError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is neither safetensors nor a torch state dict: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} does not hold a state dict (names and tensors)")
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with extra("models"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
