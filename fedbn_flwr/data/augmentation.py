"""Augmentation in batch, on the device of the batch, by chances that an explicit generator alone decides."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


def unchanged(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """No augmentation; draws nothing."""
    return inputs


def crop(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Every image shifted by an offset of its own, up to an eighth of its side each way, over zeros.

    On 32 x 32 images this is the usual random crop after padding by four pixels. Zero is the mean of the data
    once a batch is normalized.
    """
    return _pick(inputs, *_shifts(inputs, generator))


def crop_flip(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """`crop`, and every image mirrored left to right with probability one half."""
    rows, columns = _shifts(inputs, generator)
    mirrored = torch.rand(len(inputs), 1, generator=generator, device=generator.device) < 0.5
    columns = torch.where(mirrored.to(inputs.device, non_blocking=True), columns.flip(1), columns)
    return _pick(inputs, rows, columns)


AUGMENTATIONS: dict[str, Augmentation] = {"none": unchanged, "crop": crop, "crop-flip": crop_flip}


def augment(name: str, inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Augment a batch N x C x H x W; the generator may live on the CPU while the batch is on a GPU."""
    if name not in AUGMENTATIONS:
        raise ValueError(f"unknown augmentation {name!r}; there are: {', '.join(AUGMENTATIONS)}")
    return AUGMENTATIONS[name](inputs, generator)


def _border(side: int) -> int:
    return max(1, side // 8)


def _shifts(inputs: Tensor, generator: torch.Generator) -> list[Tensor]:
    """For every image the rows (N x H) and columns (N x W) of the padded image that its crop shows."""
    shown = []
    for side in inputs.shape[-2:]:
        shape, offsets = (len(inputs), 1), 2 * _border(side) + 1
        offset = torch.randint(offsets, shape, generator=generator, device=generator.device)
        shown.append(offset.to(inputs.device, non_blocking=True) + torch.arange(side, device=inputs.device))
    return shown


def _pick(inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    vertical, horizontal = (_border(side) for side in inputs.shape[-2:])
    padded = F.pad(inputs, (horizontal, horizontal, vertical, vertical))
    images = torch.arange(inputs.shape[0], device=inputs.device)[:, None, None, None]
    channels = torch.arange(inputs.shape[1], device=inputs.device)[None, :, None, None]
    return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]
