"""Data and models that are not those of images and plain BN."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr.data import Data, Split


def rows_of_numbers() -> Data:
    """Samples of 20 numbers in four classes, by the signs of the first two."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        inputs = torch.randn(count, 20, generator=generator)
        return Split(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())

    return Data("rows", split(240), split(80), 4).standardized()


def perceptron(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with one BN layer for rows of numbers."""
    return nn.Sequential(
        nn.Linear(in_channels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_classes)
    )


class WarmBatchNorm(nn.BatchNorm2d):
    """BN with a temperature that is learned, and a scale that is not."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.temperature = nn.Parameter(torch.ones(1))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, and multiply by both."""
        return super().forward(input) * self.temperature * self.scale


def warm(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with a BN layer of a kind of its own."""
    layers = (
        nn.Conv2d(in_channels, 8, 3),
        WarmBatchNorm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


class Functional(nn.Module):
    """Batch normalization that is no BN layer, with buffers of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize."""
        return F.batch_norm(inputs, self.mean, self.variance, training=self.training)


def functional(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with one BN layer that can be found and one that cannot."""
    layers = (
        nn.Conv2d(in_channels, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        Functional(8),
    )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose weight is standardized by `F.batch_norm`, as in timm's."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the standardized weight."""
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True).view_as(self.weight)
        return F.conv2d(input, weight, self.bias)


def standardized(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with BN behind a standardized convolution."""
    layers = StandardizedConv2d(in_channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class OwnNorm(nn.Module):
    """Batch normalization in plain arithmetic, of a class that is none of torch's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels, 1, 1))
        self.register_buffer("running_var", torch.ones(channels, 1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize."""
        if self.training:
            variance, mean = torch.var_mean(inputs, (0, 2, 3), correction=0)
            self.running_mean.lerp_(mean.detach().view_as(self.running_mean), 0.1)
            self.running_var.lerp_(variance.detach().view_as(self.running_var), 0.1)
        else:
            variance, mean = self.running_var, self.running_mean
        scale = (variance.view_as(self.weight) + 1e-5).rsqrt() * self.weight
        return (inputs - mean.view_as(self.weight)) * scale


def own_norm(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with a BN layer of torch's, and one of a class of its own."""
    first = nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 8, 3), OwnNorm(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(8, num_classes))


class Growing(nn.Linear):
    """Makes an entry in its first pass in training, as layers that quantize do."""

    def forward(self, input: Tensor) -> Tensor:
        """Note the largest input, beside what a linear layer does."""
        if self.training:
            self.register_buffer("largest", input.detach().amax())
        return super().forward(input)


def growing(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a network of which an entry comes later."""
    return nn.Sequential(nn.Flatten(), Growing(in_channels * image_size**2, num_classes))


class Held(nn.Sequential):
    """Keeps BN in eval mode, whatever mode is asked for."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all other layers."""
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.training = False
        return self


def held(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network that trains with the statistics that it has."""
    layers = (
        nn.Conv2d(in_channels, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return Held(*layers, nn.Linear(8, num_classes))


class HeldInPasses(nn.Sequential):
    """Sets eval mode of BN in each pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize with running statistics, whatever mode is asked for."""
        self[1].eval()
        return cast(Tensor, super().forward(inputs))  # type: ignore[no-untyped-call]


def held_in_passes(num_classes: int, in_channels: int) -> nn.Module:
    """Return the same network with a `forward` that does it."""
    return HeldInPasses(*held(num_classes, in_channels).children())


def own_convolution(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with a convolution whose weight is computed, and so cannot be
    standardized.
    """
    first = weight_norm(nn.Conv2d(in_channels, 8, 3))
    layers = nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(first, *layers, nn.Linear(8, num_classes))


def broken() -> nn.Module:
    """Fail."""
    raise KeyError("width")


def deaf(num_classes: int) -> nn.Module:
    """Return a network for inputs of 7 numbers alone."""
    return nn.Sequential(nn.Flatten(), nn.Linear(7, num_classes))


def failing() -> nn.Module:
    """Return a network whose `forward` has a mistake."""
    return Failing()


class Failing(nn.Linear):
    """Fails with an error that no layer raises."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, input: Tensor) -> Tensor:
        """Fail."""
        return dict[str, Tensor]()["inputs"]


def narrow(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a network with an output too few."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes - 1))


def wide(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a network with three outputs too many."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes + 3))


def frozen(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a network of which nothing learns."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes)
    ).requires_grad_(False)


class _Packed(nn.Module):
    """Returns what `pack` makes of the logits."""

    def __init__(self, inputs: int, num_classes: int, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.last, self._pack = nn.Linear(inputs, num_classes), pack

    def forward(self, inputs: Tensor) -> Any:
        """Return more than logits."""
        return self._pack(self.last(inputs.flatten(1)))


def with_features(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a network that returns a pair."""
    return _Packed(in_channels * image_size**2, num_classes, lambda logits: (logits, logits))


def with_names(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a network that returns a dictionary without logits."""
    return _Packed(in_channels * image_size**2, num_classes, lambda logits: {"scores": logits})
