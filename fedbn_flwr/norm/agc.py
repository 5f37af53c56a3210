"""Adaptive gradient clipping, which keeps networks without normalizers stable at larger batches."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

#: the smallest norm that weights are taken to have, so that those at 0 can leave it
EPS = 1e-3


def adaptive_clip(model: nn.Module, clip_factor: float = 0.1, skip: Collection[nn.Parameter] | None = None) -> None:
    """Clip the gradients in place, unit by unit; by default all but the classifier's.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021, equation 3:
    where |G_i| / max(|W_i|, eps) > clip_factor, G_i becomes clip_factor max(|W_i|, eps) G_i / |G_i|, for the
    weights i into one output, eps = 1e-3. A bias or a gain is one unit as a whole. FedWon's factor is 0.1.
    """
    skipped = {id(parameter) for parameter in (classifier_parameters(model) if skip is None else skip)}
    clip_gradients({name: value for name, value in model.named_parameters() if id(value) not in skipped}, clip_factor)


def clip_gradients(parameters: Mapping[str, nn.Parameter], clip_factor: float, stacked: bool = False) -> None:
    """Clip the gradients of named parameters in place; `stacked` ones have a row for each of several models."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            whole = parameter.dim() - stacked < 2 or name.rpartition(".")[2] == "gain"
            _clip(parameter.detach(), parameter.grad, clip_factor, tuple(range(stacked + (not whole), parameter.dim())))


def _clip(weight: Tensor, gradient: Tensor, factor: float, unit: tuple[int, ...]) -> None:
    """Clip where the gradient's norm over the dimensions of a unit is too large for the weight's."""
    largest = torch.linalg.vector_norm(weight, dim=unit, keepdim=True).clamp(min=EPS) * factor
    size = torch.linalg.vector_norm(gradient, dim=unit, keepdim=True)
    gradient.mul_(torch.where(size > largest, largest / size, 1))


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the last linear layer in the model's order, or of the last convolution."""
    for kind in (nn.Linear, _ConvNd):
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        if layers:
            return list(layers[-1].parameters())
    return []
