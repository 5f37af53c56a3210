"""The models by name, and building one: same seed, same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedbn_flwr import norm as norms
from fedbn_flwr.models.alexnet import alexnet_bn
from fedbn_flwr.models.custom import custom_model
from fedbn_flwr.models.fedbn_digits import digits_cnn
from fedbn_flwr.models.fedbs import fedbs_cifar_cnn, fedbs_mnist_cnn
from fedbn_flwr.models.load_weights import load_weights
from fedbn_flwr.models.mobilenet import mobilenetv2
from fedbn_flwr.models.resnet import resnet18, resnet20
from fedbn_flwr.models.small import lenet, mlp, small_cnn
from fedbn_flwr.randomness import derive


@dataclass(frozen=True)
class Entry:
    """A model of the registry: what makes it, and the square images that it can take."""

    make: Callable[[int, int, int], nn.Module]  # number of classes, channels, image size
    smallest: int
    largest: int | None = None

    def sizes(self) -> str:
        """The sizes in words."""
        if self.largest is None:
            return f"of {self.smallest}x{self.smallest} and more"
        return f"of {self.smallest}x{self.smallest} only"


MODELS: dict[str, Entry] = {
    "mlp": Entry(mlp, smallest=1),
    "lenet": Entry(lenet, smallest=16),
    "small-cnn": Entry(small_cnn, smallest=8),
    "resnet20": Entry(resnet20, smallest=8),
    "resnet18": Entry(resnet18, smallest=8),
    "mobilenetv2": Entry(mobilenetv2, smallest=8),
    "alexnet-bn": Entry(alexnet_bn, smallest=63),
    "digits-cnn": Entry(digits_cnn, smallest=28, largest=28),
    "fedbs-mnist-cnn": Entry(fedbs_mnist_cnn, smallest=28, largest=28),
    "fedbs-cifar-cnn": Entry(fedbs_cifar_cnn, smallest=32, largest=32),
}


def build(
    name: str,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    norm: str = "bn",
    seed: int = 0,
    init_from: str | Path | None = None,
    groups: int = 2,
    **norm_options: object,
) -> nn.Module:
    """Build a model of the registry, or any other given as "package.module:function".

    Its weights are a function of the seed alone, and torch's own generator is left as it was; `init_from`, a
    safetensors file or a torch state dict, replaces them. `norm`, `groups` and `norm_options` are those of
    `fedbn_flwr.norm.replace`.
    """
    make = _maker(name, image_size)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator: torch.manual_seed would reseed the accelerators' too.
        torch.default_generator.manual_seed(derive(seed, "weights"))
        model = make(num_classes, in_channels, image_size)
        model = norms.replace(model, norm, groups=groups, **norm_options)
    if init_from is not None:
        load_weights(model, Path(init_from))
    return model


def _maker(name: str, image_size: int) -> Callable[[int, int, int], nn.Module]:
    if ":" in name:
        return custom_model(name)
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f"unknown model {name!r}; there are: {known}, or package.module:function")
    entry = MODELS[name]
    if image_size < entry.smallest or (entry.largest is not None and image_size > entry.largest):
        raise ValueError(f"model {name!r} cannot take {image_size}x{image_size} images; it takes those {entry.sizes()}")
    return entry.make
