"""The device that a client trains on."""

import torch
from torch import nn


def pick_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:NUMBER") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not available here: {torch.cuda.device_count()} GPUs; known: auto, cpu")
    return device


def is_on(model: nn.Module, device: torch.device) -> bool:
    """Whether all of a model is on the device; this takes a fraction of the time of `model.to`."""
    for layer in model.modules():
        for part in (layer._parameters, layer._buffers):
            for value in part.values():
                if value is not None and value.device != device:
                    return False
    return True
