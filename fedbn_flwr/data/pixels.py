"""Operations on tensors of images: move rows onto a device, normalize, resize, measure."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from mmap import mmap

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.device import pins

#: one number a channel, for pixels from 0 to 1
Channels = tuple[float, ...]


def pick_rows(source: Tensor, indices: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the chosen rows on a device; to a GPU from pinned memory, if it can be,
    without blocking.
    """
    if device.type in ("cpu", source.device.type) or not pins():
        # faster than indexing, which first works out the kind of the index
        return source.index_select(0, indices.to(source.device)).to(device)
    pinned = torch.empty((len(indices), *source.shape[1:]), dtype=source.dtype, pin_memory=True)
    torch.index_select(source, 0, indices, out=pinned)
    return pinned.to(device, non_blocking=True)


def normalize(
    gathered: Tensor, mean: Channels, std: Channels, *, into: Tensor | None = None
) -> Tensor:
    """Return float32 inputs less the mean, divided by the standard deviation.

    A float32 argument is changed in place.

    Bytes are scaled to 0 to 1 first; ids (int64) stay as they are. An empty mean is 0, an empty
    standard deviation 1. The result is written `into` a float32 tensor of the same shape, if one is
    given.
    """
    if gathered.dtype == torch.int64:
        return gathered
    unit = 1.0
    if gathered.dtype == torch.uint8:
        unit = 255.0
    center, width = _constants(mean or (0.0,), std or (1.0,), unit, gathered.dim(), gathered.device)
    if into is None:
        inputs = gathered.to(torch.float32)
    else:
        inputs = into.copy_(gathered)
    return inputs.sub_(center).div_(width)


def mapped(shape: Sequence[int]) -> Tensor:
    """Return a float32 tensor of zeros in pages of its own, which the system has back as soon as it
    is not used.

    glibc puts large arrays into its heap once one of their size was freed, with small ones between
    them: 100 batches of 24 MB, two at a time, left it with 2 GB of holes.
    """
    return torch.frombuffer(mmap(-1, 4 * max(math.prod(shape), 1)), dtype=torch.float32)[
        : math.prod(shape)
    ].view(shape)


def resize(images: Tensor, side: int) -> Tensor:
    """Return the images at side x side pixels, bilinear, and antialiased where they get smaller."""
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def deviations(variance: Channels) -> Channels:
    """Return what inputs of these variances are divided by: 1 in place of a deviation of 0."""
    return tuple(math.sqrt(value) or 1.0 for value in variance)


def moments(images: Tensor) -> tuple[Channels, Channels]:
    """Return mean and biased variance of every channel, for pixels from 0 to 1."""
    if images.dtype == torch.uint8:
        return moments_of_pixels([images])
    variance, mean = torch.var_mean(images.double(), dim=[0, *range(2, images.dim())], correction=0)
    return tuple(mean.tolist()), tuple(variance.tolist())


def moments_of_pixels(parts: Iterable[Tensor]) -> tuple[Channels, Channels]:
    """Return what `moments` does for images of 8 or 16 bits in parts: exact, from a histogram,
    without a float copy.
    """
    histograms = [_histograms(part) for part in parts]
    highest = max(part.shape[1] for part in histograms) - 1
    counts = histograms[0].new_zeros(len(histograms[0]), highest + 1)
    for part in histograms:  # level k of 256 is level 257 k of 65,536
        counts[:, :: highest // (part.shape[1] - 1)] += part
    levels = torch.arange(highest + 1, dtype=torch.float64, device=counts.device) / highest
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ levels
    variance = (shares * (levels - mean[:, None]).square()).sum(1)
    return tuple(mean.tolist()), tuple(variance.tolist())


def _histograms(images: Tensor) -> Tensor:
    if images.is_floating_point():
        levels = 2**16
    else:
        levels = 2**8
    values = images
    if images.is_floating_point():
        values = images.mul(levels - 1).round().long()
    return torch.stack(
        [torch.bincount(channel.flatten(), minlength=levels) for channel in values.unbind(1)]
    )


@lru_cache(maxsize=64)
def _constants(
    mean: Channels, std: Channels, unit: float, dimensions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return both as tensors in the units of the stored numbers, on a device, for a batch.

    They are sent only once.
    """
    shape = -1, *(1,) * (dimensions - 2)
    center, width = (
        torch.tensor(values).mul(unit).view(shape).to(device) for values in (mean, std)
    )
    return center, width
