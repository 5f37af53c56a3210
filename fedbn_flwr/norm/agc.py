"""Adaptive gradient clipping, which keeps networks without normalizers stable at larger batches."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.conv import _ConvNd


def adaptive_clip(model: nn.Module, clip_factor: float = 0.1, skip: Collection[nn.Parameter] | None = None) -> None:
    """Clip the gradients in place, unit by unit; by default all but the classifier's.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021, equation 3:
    where |G_i| / max(|W_i|, eps) > clip_factor, G_i becomes clip_factor max(|W_i|, eps) G_i / |G_i|, for the
    weights i into one output, eps = 1e-3. A bias or a gain is one unit as a whole. FedWon's factor is 0.1.
    """
    skipped = {id(parameter) for parameter in (classifier_parameters(model) if skip is None else skip)}
    clip_gradients([parameter for parameter in model.parameters() if id(parameter) not in skipped], clip_factor)


def clip_gradients(parameters: Iterable[nn.Parameter], clip_factor: float, stacked: bool = False) -> None:
    """The same for some parameters; `stacked` ones have a row for each of several models."""
    from timm.utils.agc import adaptive_clip_grad  # takes seconds to import, and few methods clip

    def clip(weight: Tensor, gradient: Tensor) -> Tensor:
        # what timm reads of a parameter; the gradient is changed in place
        adaptive_clip_grad([_Clipped(weight, gradient)], clip_factor=clip_factor)  # type: ignore[no-untyped-call]
        return gradient

    for parameter in parameters:
        if parameter.grad is not None:
            (vmap(clip) if stacked else clip)(parameter.detach(), parameter.grad)


@dataclass(frozen=True)
class _Clipped:
    weight: Tensor
    grad: Tensor

    def detach(self) -> Tensor:
        return self.weight


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the last linear layer in the model's order, or of the last convolution."""
    for kind in (nn.Linear, _ConvNd):
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        if layers:
            return list(layers[-1].parameters())
    return []
