"""Adaptive gradient clipping, which keeps networks without normalizers stable at larger batches."""

from collections.abc import Collection, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.conv import _ConvNd

#: norms below these count as these: eps of the equation, and a guard against division by zero
SMALLEST_WEIGHT, SMALLEST_GRADIENT = 1e-3, 1e-6


def adaptive_clip(model: nn.Module, clip_factor: float = 0.1, skip: Collection[nn.Parameter] | None = None) -> None:
    """Clip the gradients in place, unit by unit; by default all but the classifier's.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021, equation 3:
    where |G_i| / max(|W_i|, eps) > clip_factor, G_i becomes clip_factor max(|W_i|, eps) G_i / |G_i|, for the
    weights i into one output, eps = 1e-3. A bias or a gain is one unit as a whole. FedWon's factor is 0.1.
    """
    skipped = {id(parameter) for parameter in (classifier_parameters(model) if skip is None else skip)}
    clip_gradients([parameter for parameter in model.parameters() if id(parameter) not in skipped], clip_factor)


def clip_gradients(parameters: Iterable[nn.Parameter], clip_factor: float, stacked: bool = False) -> None:
    """Clip the gradients of these parameters in place; `stacked` ones have a row for each of several models."""
    clip = partial(_clip, clip_factor=clip_factor)
    for parameter in parameters:
        if parameter.grad is not None:
            (vmap(clip) if stacked else clip)(parameter.detach(), parameter.grad)


def _clip(weight: Tensor, gradient: Tensor, clip_factor: float) -> Tensor:
    """Clip one gradient in place; timm's function does the same, but `vmap` would loop over its `clamp_`."""
    largest = _unit_norms(weight).clamp(min=SMALLEST_WEIGHT) * clip_factor
    norms = _unit_norms(gradient)
    clipped = gradient * (largest / norms.clamp(min=SMALLEST_GRADIENT))
    return gradient.copy_(torch.where(norms < largest, gradient, clipped))


def _unit_norms(values: Tensor) -> Tensor:
    """Return the norm of the weights into each output, or of a whole vector."""
    # without dimensions, all of them count
    norms: Tensor = torch.linalg.vector_norm(values, dim=tuple(range(1, values.dim())), keepdim=values.dim() > 1)
    return norms


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the last linear layer in the model's order, or of the last convolution."""
    for kind in (nn.Linear, _ConvNd):
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        if layers:
            return list(layers[-1].parameters())
    return []
