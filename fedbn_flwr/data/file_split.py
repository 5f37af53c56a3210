"""A split whose images stay in files, and are decoded mini-batch by mini-batch."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.augmentation import Edits, Size
from fedbn_flwr.data.decoding import DecodeRequest, Fit, Source
from fedbn_flwr.data.pixels import Channels, mapped, moments_of_pixels, normalize, pick_rows
from fedbn_flwr.data.prefetch import decode
from fedbn_flwr.data.splits import LABEL_MAPS, Batch, Split, renumbered_classes
from fedbn_flwr.randomness import numpy_generator

#: processes that decode ahead, unless an option says otherwise
WORKERS = 2
#: images of a training split that its mean and deviation are measured on
MEASURED = 1024

#: returns the files of the images in some rows, or their bytes
Images = Callable[[NDArray[np.int64]], Sequence[Source]]


class ImageFiles:
    """Files in one folder and below.

    Only their names are kept, 38 MB for ImageNet's 1.28 million.
    """

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        self._root = root
        self._names = np.array([os.fsencode(name) for name in names])

    def __call__(self, rows: NDArray[np.int64]) -> list[Source]:
        """Return the paths of the images in these rows."""
        return [os.path.join(self._root, os.fsdecode(name)) for name in self._names[rows].tolist()]


class EncodedImages:
    """Images in memory as the bytes of files."""

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self._encoded = encoded

    def __call__(self, rows: NDArray[np.int64]) -> list[Source]:
        """Return the bytes of the images in these rows."""
        return [self._encoded[row] for row in rows]


@dataclass(frozen=True, eq=False)
class FileSplit(Split):
    """A split that holds files.

    Its `inputs` have a shape and a type, but no values (they are on the device `meta`).

    Where there are label `maps`, one for each image, a batch's targets are these, N x H x W;
    `classes` says which class a value of a map is.
    """

    images: Images = field(kw_only=True)
    #: the row of each sample in `images` and `maps`
    rows: Tensor = field(kw_only=True)
    fit: Fit = field(default="squash", kw_only=True)
    maps: Images | None = field(default=None, kw_only=True)
    classes: Tensor | None = field(default=None, kw_only=True)
    #: processes that decode ahead
    workers: int = field(default=WORKERS, kw_only=True)

    @classmethod
    def of(
        cls,
        images: Images,
        labels: Sequence[int],
        size: int | Size,
        domains: Sequence[int] = (),
        **fields: Any,
    ) -> Self:
        """Make a split of RGB images of a size (a side, or height and width), with domains if there
        are any.
        """
        columns = (
            torch.tensor(labels, dtype=torch.int64),
            torch.tensor(domains) if domains else None,
        )
        return cls(
            _placeholder(len(labels), size),
            *columns,
            images=images,
            rows=torch.arange(len(labels)),
            **fields,
        )

    @property
    def targets(self) -> str:
        """What the targets are in words, if they are no classes of samples."""
        if self.maps is not None:
            return LABEL_MAPS
        return super().targets

    @property
    def size(self) -> Size:
        """Height and width."""
        return self.inputs.shape[-2], self.inputs.shape[-1]

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        """Decode the chosen samples, in this process."""
        return next(replace(self, workers=0).batches(indices, [len(indices)], device))

    def batches(
        self,
        indices: Tensor,
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
        edits: Edits | None = None,
    ) -> Iterator[Batch]:
        """Decode batches of these sizes, a few ahead of the one that is used."""
        chosen = indices.split(list(sizes))
        device = torch.device(device)
        if edits is None:
            seeds = [()] * len(chosen)
        else:
            seeds = edits.seeds.split(list(sizes))
        requests = (
            self._request(part, edits, own) for part, own in zip(chosen, seeds, strict=True)
        )
        for part, (pixels, maps) in zip(chosen, decode(requests, self.workers), strict=True):
            if maps is None:
                targets = pick_rows(self.labels, part, device)
            else:
                targets = maps.to(device)
            into = None
            if device.type == "cpu":
                into = mapped(pixels.shape)
            yield normalize(pixels.to(device), self.mean, self.std, into=into), targets

    def select(self, indices: NDArray[np.int64]) -> Self:
        """Return a new split of the chosen samples."""
        return replace(super().select(indices), rows=self.rows[torch.from_numpy(indices)])

    def in_memory(self) -> Split:
        """Return the split with all its images decoded."""
        images, _ = self._request(torch.arange(len(self))).decode()
        return Split(images, self.labels, self.domains, self.mean, self.std)

    def renumbered(self, numbers: Tensor) -> "Split":
        """Return the split with `numbers` in place of the classes 0, 1, ...."""
        if self.classes is None:
            return super().renumbered(numbers)
        return replace(self, classes=renumbered_classes(self.classes, numbers))

    def resized(self, side: int) -> "FileSplit":
        """Return the split with images of another size."""
        fit = "squash" if self.fit == "exact" else self.fit
        return replace(self, inputs=_placeholder(len(self), side), fit=fit)

    def moments(self) -> tuple[Channels, Channels]:
        """Return mean and variance of every channel, on at most `MEASURED` random images."""
        order = numpy_generator(0, "moments").permutation(len(self))[:MEASURED]
        parts = torch.from_numpy(np.sort(order)).split(16)
        requests = (self._request(part) for part in parts)
        return moments_of_pixels(images for images, _ in decode(requests, self.workers))

    def _request(
        self, part: Tensor, edits: Edits | None = None, seeds: Tensor | Sequence[int] = ()
    ) -> DecodeRequest:
        rows = self.rows[part.cpu()].numpy()
        maps = () if self.maps is None else self.maps(rows)
        return DecodeRequest(
            self.images(rows),
            self.size,
            self.fit,
            None if edits is None else edits.augmentation,
            seeds.tolist() if isinstance(seeds, Tensor) else seeds,
            maps,
            self.classes,
        )


def _placeholder(count: int, size: int | Size) -> Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    return torch.empty((count, 3, height, width), dtype=torch.uint8, device="meta")
