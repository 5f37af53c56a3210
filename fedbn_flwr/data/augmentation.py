"""Augmentations by name, and those of a whole batch on the batch's device.

An explicit generator makes every random choice. Augmentations of single images are in `image_augmentation`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.data.image_augmentation import FlipRotate, RandomCrop, ResizedCropFlip
from fedbn_flwr.data.pixels import Channels, normalize
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import Range, UsageError, options_of, read_options, read_pairs

#: batch N x C x H x W, generator, and the channels' mean and standard deviation that the batch was normalized with
Augmentation = Callable[[Tensor, torch.Generator, Channels, Channels], Tensor]


def unchanged(inputs: Tensor, generator: torch.Generator, mean: Channels, std: Channels) -> Tensor:
    """Return the batch itself, and draw nothing."""
    return inputs


@dataclass(frozen=True)
class Crop:
    """Pads every image and cuts it back to its size at a random place; `flip` then mirrors half of the images.

    `padding` is in pixels on each side. By default it is an eighth of the side, the usual 4 on 32 x 32 images. `fill`
    is the value of the added pixels before normalization, from 0 (black) to 1 (white). By default the added pixels are
    0 after normalization, the mean of the data. FixBN pads by 2 pixels (appendix A.1), which torchvision's RandomCrop
    leaves black: `crop-flip:padding=2:fill=0`.
    """

    flip: bool
    padding: Annotated[int | None, Range(0)] = None
    fill: Annotated[float | Literal["mean"], Range(0, 1)] = "mean"

    def __call__(self, inputs: Tensor, generator: torch.Generator, mean: Channels, std: Channels) -> Tensor:
        """Crop a batch."""
        rows, columns = (self._shown(inputs, side, generator) for side in inputs.shape[-2:])
        if self.flip:
            mirrored = torch.rand(len(inputs), 1, generator=generator, device=generator.device) < 0.5
            columns = torch.where(mirrored.to(inputs.device, non_blocking=True), columns.flip(1), columns)
        padded = self._padded(inputs, mean, std)
        images = torch.arange(inputs.shape[0], device=inputs.device)[:, None, None, None]
        channels = torch.arange(inputs.shape[1], device=inputs.device)[None, :, None, None]
        return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]

    def _border(self, side: int) -> int:
        return max(1, side // 8) if self.padding is None else self.padding

    def _shown(self, inputs: Tensor, side: int, generator: torch.Generator) -> Tensor:
        """Draw for every image which rows (or columns) of the padded image its crop shows: N x side."""
        offsets, shape = 2 * self._border(side) + 1, (len(inputs), 1)
        offset = torch.randint(offsets, shape, generator=generator, device=generator.device)
        return offset.to(inputs.device, non_blocking=True) + torch.arange(side, device=inputs.device)

    def _padded(self, inputs: Tensor, mean: Channels, std: Channels) -> Tensor:
        height, width = inputs.shape[-2:]
        above, left = self._border(height), self._border(width)
        if isinstance(self.fill, str):
            return F.pad(inputs, (left, left, above, above))
        fill = torch.full((1, inputs.shape[1], 1, 1), self.fill, device=inputs.device)
        shape = (*inputs.shape[:2], height + 2 * above, width + 2 * left)
        padded = normalize(fill, mean, std).to(inputs.dtype).expand(shape).clone()
        padded[..., above : above + height, left : left + width] = inputs
        return padded


def _no_augmentation() -> Augmentation:
    """Images as they are."""
    return unchanged


#: makes an augmentation from its options
AUGMENTATIONS: dict[str, Callable[..., Augmentation]] = {
    "none": _no_augmentation,
    "crop": partial(Crop, False),
    "crop-flip": partial(Crop, True),
    "resized-crop-flip": ResizedCropFlip,
    "flip-rotate": FlipRotate,
    "random-crop": RandomCrop,
}


@lru_cache(maxsize=64)
def parse_augmentation(spec: str) -> Augmentation:
    """Read `NAME[:option=VALUE]...`; a name or option that does not exist is a UsageError."""
    name, *items = spec.split(":")
    if name not in AUGMENTATIONS:
        raise UsageError(f"unknown augmentation {name!r}; {did_you_mean(name, AUGMENTATIONS)}")
    owner, make = f"augmentation {name!r}", AUGMENTATIONS[name]
    return make(**read_options(owner, options_of(make), read_pairs(owner, items)))
