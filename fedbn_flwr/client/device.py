"""The device that a client trains on, the precision (TF32 products, bfloat16 autocast), and the order of images."""

import threading
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.wire import Instruction

PRECISIONS = ("float32", "tf32", "bf16")
#: torch's own layers, whose forward leaves open which order images have
ANY_ORDER = {
    *(nn.Sequential, nn.Identity, nn.Conv2d, nn.BatchNorm2d, nn.BatchNorm1d, nn.ReLU, nn.ReLU6),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear),
}
#: whose models' forwards leave it open, too; a forward of somebody else may need the usual order
_OPEN_PACKAGES = ("fedbn_flwr.models.", "torchvision.")
#: what the order pays for (docs/benchmarks.md, "The order of images"): the smallest side of an image, the largest
#: number of weights of a convolution, and the smallest number of its channels
_SMALLEST_SIDE, _MOST_WEIGHTS, _FEWEST_CHANNELS = 32, 500_000, 8


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


def autocast(instruction: Instruction, device: torch.device) -> AbstractContextManager[Any]:
    """Bfloat16 autocast where the instruction asks for it."""
    if instruction.precision not in PRECISIONS:
        raise ValueError(f"unknown precision {instruction.precision!r}; known: {', '.join(PRECISIONS)}")
    return torch.autocast(device.type, torch.bfloat16) if instruction.precision == "bf16" else nullcontext()


def products(instruction: Instruction) -> AbstractContextManager[Any]:
    """Around forward and backward passes: lets GPUs use TF32 for products too, where that is asked for."""
    return _TF32 if instruction.precision == "tf32" else nullcontext()


class _AllowTF32:
    """A setting of the process, in force until everybody who asked for it is done: steps may be suspended in turn."""

    def __init__(self) -> None:
        self._askers, self._before, self._lock = 0, False, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._askers:
                self._before = torch.backends.cuda.matmul.allow_tf32
                torch.backends.cuda.matmul.allow_tf32 = True
            self._askers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._askers -= 1
            if not self._askers:
                torch.backends.cuda.matmul.allow_tf32 = self._before


_TF32 = _AllowTF32()


def channels_last(images: Tensor, model: nn.Module) -> Tensor:
    """Return the inputs of a model, channels last if training on them is faster in this order."""
    if images.dim() != 4 or min(images.shape[-2:]) < _SMALLEST_SIDE or images.device.type != "cpu" or not _pays(model):
        return images
    return images.contiguous(memory_format=torch.channels_last)


def _pays(model: nn.Module) -> bool:
    layers, open_kinds = list(model.modules()), {*ANY_ORDER, nn.Dropout}
    leaves = [layer for layer in layers if not layer._modules]
    convolutions = [layer for layer in leaves if isinstance(layer, nn.Conv2d)]
    return (
        all(type(layer) in open_kinds or type(layer).__module__.startswith(_OPEN_PACKAGES) for layer in layers)
        # a mask for images is drawn in their order
        and all(type(after) is nn.Linear for layer, after in pairwise(leaves) if type(layer) is nn.Dropout)
        and bool(convolutions)
        and all(each.weight.numel() <= _MOST_WEIGHTS for each in convolutions)
        and all(each.out_channels >= _FEWEST_CHANNELS for each in convolutions)
    )
