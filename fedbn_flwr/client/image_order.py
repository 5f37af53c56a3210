"""The order of images in memory: channels last, where training is faster so."""

from itertools import pairwise

import torch
from torch import Tensor, nn

#: torch's own layers, whose forward leaves open which order images have
ANY_ORDER = {
    nn.Sequential,
    nn.Identity,
    nn.Conv2d,
    nn.BatchNorm2d,
    nn.BatchNorm1d,
    nn.ReLU,
    nn.ReLU6,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Linear,
}
#: whose models' forwards leave it open, too; a forward of somebody else may need the usual order
_OPEN_PACKAGES = ("fedbn_flwr.models.", "timm.", "torchvision.")
#: what the order pays for (docs/benchmarks.md, "The order of images"): the smallest side of an
#: image, the largest number of weights of a convolution, and the smallest number of its channels
_SMALLEST_SIDE = 24
_MOST_WEIGHTS = 500_000
_FEWEST_CHANNELS = 8


def channels_last(images: Tensor, model: nn.Module) -> Tensor:
    """Return the inputs of a model, channels last if training on them is faster in this order."""
    if (
        images.dim() != 4
        or min(images.shape[-2:]) < _SMALLEST_SIDE
        or images.device.type != "cpu"
        or not _pays(model)
    ):
        return images
    # images of one channel are `contiguous` in either order, and layers go by the strides
    return images.to(memory_format=torch.channels_last)


def _pays(model: nn.Module) -> bool:
    layers = list(model.modules())
    open_kinds = {*ANY_ORDER, nn.Dropout}
    leaves = [layer for layer in layers if not layer._modules]
    convolutions = [layer for layer in leaves if isinstance(layer, nn.Conv2d)]
    return (
        all(
            type(layer) in open_kinds or type(layer).__module__.startswith(_OPEN_PACKAGES)
            for layer in layers
        )
        # a mask for images is drawn in their order
        and all(
            type(after) is nn.Linear
            for layer, after in pairwise(leaves)
            if type(layer) is nn.Dropout
        )
        and bool(convolutions)
        and all(each.weight.numel() <= _MOST_WEIGHTS for each in convolutions)
        and all(each.out_channels >= _FEWEST_CHANNELS for each in convolutions)
    )
