"""A data set in memory: tensors that all clients of a process share, and take their batches from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.pixels import Channels, gather, measure, normalize, resize
from fedbn_flwr.randomness import numpy_generator

#: splits of up to so many numbers are kept normalized: 256 MB
MOST_READY = 2**26
#: batches of up to so many numbers are gathered together: 4 MB
MOST_TOGETHER = 2**20


@dataclass(frozen=True, eq=False)
class Split:
    """Samples with labels and, where the data have domains, the domain that each came from.

    The inputs are N x C x H x W, uint8 (0 to 255) or float32, in memory or memory-mapped
    (`torch.from_file`); labels and domains are int64. `mean` and `std` hold one number a channel, for
    inputs scaled to [0, 1]; where they are empty, batches are not normalized.
    """

    inputs: Tensor
    labels: Tensor
    domains: Tensor | None = None
    mean: Channels = ()
    std: Channels = ()
    _ready: "_Ready" = field(default_factory=lambda: _Ready(), init=False, repr=False)

    def __post_init__(self) -> None:
        shape, dtype = tuple(self.inputs.shape), self.inputs.dtype
        if len(shape) != 4 or dtype not in (torch.uint8, torch.float32):
            raise ValueError(f"inputs must be N x C x H x W, uint8 or float32, not {shape}, {dtype}")
        for name, column in (("labels", self.labels), ("domains", self.domains)):
            if column is not None and (column.dtype != torch.int64 or column.shape != shape[:1]):
                found = f"{tuple(column.shape)}, {column.dtype}"
                raise ValueError(f"{name} must be one int64 for each of {shape[0]} samples, not {found}")

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The chosen samples on a device: normalized float32 inputs, and labels.

        Bytes travel to a GPU as bytes, from pinned memory and without blocking, and become floats there.
        """
        device = torch.device(device)
        ready = self._ready.inputs(self, len(indices), device)
        if ready is None:
            inputs = normalize(gather(self.inputs, indices, device), self.mean, self.std)
        else:
            inputs = gather(ready, indices, device)
        return inputs, gather(self.labels, indices, device)

    def batches(
        self, indices: Tensor, sizes: Sequence[int], device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of these sizes, as `batch` gives them; small ones are gathered together, as views of one tensor."""
        start = 0
        for portion in _portions(sizes, MOST_TOGETHER // max(self.inputs[:1].numel(), 1)):
            end = start + sum(portion)
            inputs, labels = self.batch(indices[start:end], device)
            yield from zip(inputs.split(portion), labels.split(portion), strict=True)
            start = end

    def select(self, indices: NDArray[np.int64]) -> "Split":
        """A split of its own with the chosen samples."""
        chosen = torch.from_numpy(indices)
        domains = None if self.domains is None else self.domains[chosen]
        return replace(self, inputs=self.inputs[chosen], labels=self.labels[chosen], domains=domains)

    def to(self, device: torch.device | str) -> "Split":
        """The split held on a device, for data that fit there: its batches are then gathered there."""
        domains = None if self.domains is None else self.domains.to(device)
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device), domains=domains)


def _portions(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """In lists of at most so many samples, or of one size."""
    portion: list[int] = []
    count = 0
    for size in sizes:
        if portion and count + size > most:
            yield portion
            portion, count = [], 0
        portion.append(size)
        count += size
    if portion:
        yield portion


class _Ready:
    """All inputs of a split, normalized once: from when so many were asked for that they would have been by then.

    Only where they already are on the device, and take little memory. A tensor that was changed is normalized anew.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._made: tuple[int, Tensor] | None = None

    def __reduce__(self) -> tuple[type["_Ready"], tuple[()]]:
        """Another process makes its own."""
        return _Ready, ()

    def inputs(self, split: Split, count: int, device: torch.device) -> Tensor | None:
        """What batches can be gathered from as it is, if there is such a thing."""
        source = split.inputs
        if source.device.type != device.type or source.is_inference():
            return None
        if not split.mean and not split.std and source.dtype == torch.float32:
            return source
        self._asked += count
        if self._asked <= len(split) or source.numel() > MOST_READY:
            return None
        if self._made is None or self._made[0] != source._version:
            self._made = source._version, normalize(source.clone(), split.mean, split.std)
        return self._made[1]


@dataclass(frozen=True, eq=False)
class Data:
    """A training and a test split of one task; domains, if any, are numbered in the order of their names."""

    name: str
    train: Split
    test: Split
    num_classes: int
    domain_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            _check_range(f"{self.name}: labels", split.labels, self.num_classes)
            if (split.domains is None) == bool(self.domain_names):
                raise ValueError(f"{self.name}: domain names and the domains of both splits go together")
            if split.domains is not None:
                _check_range(f"{self.name}: domains", split.domains, len(self.domain_names))

    @property
    def in_channels(self) -> int:
        """The channels of an image."""
        return self.train.inputs.shape[1]

    @property
    def image_size(self) -> int:
        """The side of a square image."""
        return self.train.inputs.shape[-1]

    def resized(self, side: int) -> "Data":
        """The same images at another size."""
        train, test = (replace(split, inputs=resize(split.inputs, side)) for split in (self.train, self.test))
        return replace(self, train=train, test=test)

    def standardized(self) -> "Data":
        """The same tensors; batches of both splits use the training split's mean and deviation."""
        mean, std = measure(self.train.inputs)
        train, test = (replace(split, mean=mean, std=std) for split in (self.train, self.test))
        return replace(self, train=train, test=test)

    def validation_split(self, fraction: float, seed: int) -> "Data":
        """The training split less a share of every class (and domain), which takes the test split's place.

        What is tuned can so be chosen without the test split. The same arguments give the same object.
        """
        return _validation_split(self, fraction, seed)


def stratified(strata: NDArray[np.int64], count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """The sorted positions of `count` samples, from every stratum its share to within one sample."""
    order = np.lexsort((generator.random(len(strata)), strata))
    # evenly spaced ticks on the samples in the order of their strata, which are in random order within one
    ticks = np.arange(len(strata) + 1) * count // len(strata)
    return np.sort(order[np.diff(ticks) == 1])


@lru_cache(maxsize=8)
def _validation_split(data: Data, fraction: float, seed: int) -> Data:
    split = data.train
    count = round(fraction * len(split))
    if not 0 < count < len(split):
        raise ValueError(f"{data.name}: a share of {fraction} of {len(split)} samples leaves one side empty")
    strata = split.labels.numpy(force=True)
    if split.domains is not None:
        strata = strata * len(data.domain_names) + split.domains.numpy(force=True)
    held_out = stratified(strata, count, numpy_generator(seed, "validation"))
    kept = np.setdiff1d(np.arange(len(split)), held_out, assume_unique=True)
    return replace(data, train=split.select(kept), test=split.select(held_out))


def _check_range(what: str, values: Tensor, count: int) -> None:
    if len(values) == 0:
        return
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= count:
        raise ValueError(f"{what} must be from 0 to {count - 1}, not {lowest} to {highest}")
