"""Convolutions with scaled weight standardization."""

from collections.abc import Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


class _ScaledStd(_ConvNd):
    """A convolution with the weight gain gamma (W - mean) / (sigma sqrt(N)), a row an output, N the
    fan-in.

    Brock et al., "Characterizing Signal Propagation", 2021; with two dimensions it is timm's
    `ScaledStdConv2d` with the same `eps`. The equation has none. This one keeps a constant row
    finite, and changes rows of unit norm by less than 1e-8 up to a fan-in of 20,000, where timm's
    default, 1e-6, changes them by 2e-3 at a fan-in of 4,608.
    """

    def __init__(
        self, *arguments: Any, gamma: float = 1.0, eps: float = 1e-12, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.scale = gamma * self.weight[0].numel() ** -0.5
        self.eps = eps
        self.gain: Tensor = nn.Parameter(
            self.weight.new_ones(self.out_channels, *[1] * (self.weight.dim() - 1))
        )

    def forward(self, input: Tensor) -> Tensor:
        """Convolve, in the way of the layer that this one was, with the standardized weight."""
        inputs = tuple(range(1, self.weight.dim()))
        variance, mean = torch.var_mean(self.weight, dim=inputs, correction=0, keepdim=True)
        # in the instance's own dictionary, where it comes before the parameter of this name
        self.__dict__["weight"] = (
            (self.weight - mean) * (variance + self.eps).rsqrt() * self.gain * self.scale
        )
        try:
            output: Tensor = super().forward(input)
        finally:
            del self.__dict__["weight"]
        return output


class ScaledStdConv1d(_ScaledStd, nn.Conv1d):
    """The one-dimensional one."""


class ScaledStdConv2d(_ScaledStd, nn.Conv2d):
    """The two-dimensional one."""


class ScaledStdConv3d(_ScaledStd, nn.Conv3d):
    """The three-dimensional one."""


_KINDS: dict[type[nn.Module], type[_ScaledStd]] = {
    nn.Conv1d: ScaledStdConv1d,
    nn.Conv2d: ScaledStdConv2d,
    nn.Conv3d: ScaledStdConv3d,
}


def standardized(
    name: str,
    layer: nn.Module,
    gamma: float | None,
    first_gain: float = 1.0,
    learnable: bool = False,
) -> nn.Module:
    """The standardized convolution for a convolution's place, with its parameters.

    Any other layer as it is.

    Rows of the weight are scaled to a centred norm of 1. Outputs stay the same, but not how fast
    the rows learn. Without a gamma there is no scaling: rows of the weight get the standard
    deviation 1, whatever the fan-in. A transposed convolution stays as it is, and so does one with
    a fan-in of 1, which has nothing to standardize.
    """
    if (
        not isinstance(layer, _ConvNd)
        or isinstance(layer, _ConvTransposeNd)
        or layer.weight[0].numel() == 1
    ):
        return layer
    if "weight" not in layer._parameters:
        raise ValueError(f"layer {name!r} computes its weight, which cannot be standardized")
    if _standardizes(layer):
        kind = type(layer).__name__
        raise ValueError(f"layer {name!r} is a {kind}, which standardizes its weight already")
    new: Any = _like(layer)
    new.eps = 1e-12
    if gamma is None:
        new.scale = 1.0
    else:
        new.scale = gamma * layer.weight[0].numel() ** -0.5
    _start_at_unit_norm(new.weight)
    gain = layer.weight.new_full((len(layer.weight), *[1] * (layer.weight.dim() - 1)), first_gain)
    if learnable:
        new.gain = nn.Parameter(gain)
    else:  # a constant is neither trained nor sent
        new.register_buffer("gain", gain, persistent=False)
    return new.train(layer.training)  # type: ignore[no-any-return]


@torch.no_grad()
def _standardizes(layer: _ConvNd) -> bool:
    """Return whether a convolution's output does not depend on the scale of its weight."""
    if type(layer).forward.__module__.startswith("torch."):
        return False
    sizes = [2 * step * size for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    inputs = _waves(layer.weight, (1, layer.in_channels, *sizes))
    tried = deepcopy(layer)  # a forward may move what the layer keeps
    tried.weight.copy_(_waves(layer.weight, layer.weight.shape))
    once = tried(inputs)
    tried.weight.mul_(2)
    twice = tried(inputs)
    return bool((twice - once).abs().max() < 1e-3 * once.abs().max())


def _waves(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return numbers of which no two are the same."""
    return torch.arange(prod(shape), device=like.device).sin().to(like.dtype).view(*shape)


def _like(layer: _ConvNd) -> nn.Module:
    """Return a layer with the same parameters and attributes, and a forward that standardizes the
    weight before.
    """
    kind: Any = _KINDS.get(type(layer)) or type(
        f"ScaledStd{type(layer).__name__}", (_ScaledStd, type(layer)), {}
    )
    new: nn.Module = kind.__new__(kind)
    for name, value in vars(layer).items():
        if isinstance(value, dict | set):
            new.__dict__[name] = value.copy()
        else:
            new.__dict__[name] = value
    return new


@torch.no_grad()
def _start_at_unit_norm(weight: Tensor) -> None:
    """Scale the rows to a centred norm of 1, as Brock et al. start, which leaves the output as it
    is.

    The gradient is inversely proportional to the norm. What plain convolutions start with is below
    0.1 in wide depthwise ones, which would then learn hundreds of times faster than others.
    """
    rows = weight.flatten(1)
    norms = (rows - rows.mean(dim=1, keepdim=True)).norm(dim=1)
    weight.div_(torch.where(norms > 0, norms, 1).view(-1, *[1] * (weight.dim() - 1)))
