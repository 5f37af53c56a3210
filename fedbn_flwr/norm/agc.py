"""Adaptive gradient clipping, which keeps networks without normalizers stable at larger batches."""

from collections.abc import Collection

from torch import nn
from torch.nn.modules.conv import _ConvNd


def adaptive_clip(model: nn.Module, clip_factor: float = 0.1, skip: Collection[nn.Parameter] | None = None) -> None:
    """Clip the gradients in place, unit by unit; by default all but the classifier's.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021, equation 3:
    where |G_i| / max(|W_i|, eps) > clip_factor, G_i becomes clip_factor max(|W_i|, eps) G_i / |G_i|, for the
    weights i into one output, eps = 1e-3. A bias or a gain is one unit as a whole. FedWon's factor is 0.1.
    """
    from timm.utils.agc import adaptive_clip_grad  # takes seconds to import, and few methods clip

    skipped = {id(parameter) for parameter in (classifier_parameters(model) if skip is None else skip)}
    clipped = [parameter for parameter in model.parameters() if id(parameter) not in skipped]
    adaptive_clip_grad(clipped, clip_factor=clip_factor)  # type: ignore[no-untyped-call]


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the last linear layer in the model's order, or of the last convolution."""
    for kind in (nn.Linear, _ConvNd):
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        if layers:
            return list(layers[-1].parameters())
    return []
