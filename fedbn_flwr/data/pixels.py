"""What is done to images as tensors: gathered onto a device, resized, measured."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

#: one number a channel, for inputs scaled to [0, 1]
Channels = tuple[float, ...]


def gather(source: Tensor, indices: Tensor, device: torch.device) -> Tensor:
    """A copy of the chosen rows on a device; to a GPU from pinned memory, without blocking."""
    if source.device.type == device.type:
        # in a fraction of the time that indexing takes to find out what is meant
        return source.index_select(0, indices.to(source.device)).to(device)
    if device.type != "cuda":
        return source[indices].to(device)
    pinned = torch.empty((len(indices), *source.shape[1:]), dtype=source.dtype, pin_memory=True)
    torch.index_select(source, 0, indices, out=pinned)
    return pinned.to(device, non_blocking=True)


def normalize(gathered: Tensor, mean: Channels, std: Channels) -> Tensor:
    """Float32 inputs, less the mean and divided by the deviation; changes a float32 argument in place."""
    unit = 255.0 if gathered.dtype == torch.uint8 else 1.0
    center, width = _constants(mean or (0.0,), std or (1.0,), unit, gathered.device)
    return gathered.to(torch.float32).sub_(center).div_(width)


def resize(images: Tensor, side: int) -> Tensor:
    """The images at side x side pixels, bilinear, antialiased where that makes them smaller."""
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def measure(images: Tensor) -> tuple[Channels, Channels]:
    """Mean and deviation of every channel; a constant channel gets deviation 1, which can be divided by."""
    if images.dtype == torch.uint8:
        mean, variance = _byte_moments(images)
    else:
        variance, mean = torch.var_mean(images.double(), dim=(0, 2, 3), correction=0)
    return tuple(mean.tolist()), tuple(value or 1.0 for value in variance.sqrt().tolist())


def _byte_moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance from how often every byte occurs, exactly and without a float copy of the data."""
    levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ levels
    return mean, (shares * (levels - mean[:, None]).square()).sum(1)


@lru_cache(maxsize=64)
def _constants(mean: Channels, std: Channels, unit: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both in the units of the stored numbers, shaped to meet a batch; sent to a device only once."""
    center, width = (torch.tensor(values).mul(unit).view(-1, 1, 1).to(device) for values in (mean, std))
    return center, width
