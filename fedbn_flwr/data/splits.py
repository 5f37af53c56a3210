"""A data set in memory: tensors that all clients of a process share, and load their batches from.

`file_split` has the same for images that stay in files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.augmentation import IGNORED, Edits, label_map
from fedbn_flwr.data.decoding import stack_samples
from fedbn_flwr.data.pixels import Channels, deviations, moments, normalize, pick_rows, resize
from fedbn_flwr.device import total_memory
from fedbn_flwr.randomness import numpy_generator

#: largest number of values that are gathered together for several batches: 4 MB in float32
MOST_TOGETHER = 2**20
#: share of a GPU's memory up to which a split is sent there once, to stay: of 16 processes with two
#: splits, half of it
MOST_STAYING = 1 / 64

#: most classes or domains that a line names
MOST_NAMES = 20

#: inputs and targets
Batch = tuple[Tensor, Tensor]
#: targets that are no classes of samples, in words
LABEL_MAPS = "label maps"
FLOATS = "float targets"
#: the task of targets, unless data name one that is registered
USUAL_TASKS = {"": "classification", LABEL_MAPS: "segmentation", FLOATS: "regression"}


@dataclass(frozen=True, eq=False)
class Split:
    """Samples with labels and, where the data have domains, each sample's domain.

    The inputs are N x C x H x W, or of another shape that starts with N x C; uint8 (0 to 255),
    float32, or int64 for ids, in memory or memory-mapped (`torch.from_file`). Domains are int64,
    and so are labels, or for regression float32 of any shape that starts with N. Images, volumes
    and signals may have label maps, inputs without their channels in int64 or int16, where pixels
    without a class are `IGNORED`. Only images can be resized or augmented. `mean` and `std` hold
    one number a channel, for inputs scaled to [0, 1]; where they are empty, batches are not
    normalized. Ids never are.
    """

    inputs: Tensor
    labels: Tensor
    domains: Tensor | None = None
    mean: Channels = ()
    std: Channels = ()

    def __post_init__(self) -> None:
        shape = tuple(self.inputs.shape)
        dtype = self.inputs.dtype
        if len(shape) < 2 or dtype not in (torch.uint8, torch.float32, torch.int64):
            raise ValueError(
                f"inputs must be N x C [x H x W], uint8, float32 or (for ids) int64, not {shape}, "
                f"{dtype}"
            )
        labels = self.labels
        samples = f"one int64 for each of {shape[0]} samples"
        columns = [("domains", self.domains, shape[:1], [torch.int64], samples)]
        is_float = labels.dtype == torch.float32
        if len(shape) > 2 and labels.dim() == len(shape) - 1 and not is_float:
            places = (shape[0], *shape[2:])
            able = f"int64 or int16 for each pixel, {places}"
            columns.append(("labels", labels, places, [torch.int64, torch.int16], able))
        elif not is_float or labels.shape[:1] != shape[:1]:
            columns.append(("labels", labels, shape[:1], [torch.int64], samples))
        for name, column, wanted, dtypes, able in columns:
            if column is not None and (column.dtype not in dtypes or column.shape != wanted):
                raise ValueError(
                    f"{name} must be {able}, not {tuple(column.shape)}, {column.dtype}"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def targets(self) -> str:
        """What the targets are in words, if they are no classes of samples."""
        if self.labels.is_floating_point():
            return FLOATS
        if self.labels.dim() > 1:
            return LABEL_MAPS
        return ""

    @property
    def is_dense(self) -> bool:
        """Whether float targets may be pictures, as those of an image that is to be denoised."""
        return self.targets == FLOATS and self.labels.dim() > 2

    @property
    def counted(self) -> Tensor:
        """The class of every sample, or of every pixel that has one."""
        if self.targets == LABEL_MAPS:
            return self.labels[self.labels != IGNORED]
        return self.labels

    @property
    def has_ids(self) -> bool:
        """Whether inputs are ids, such as those of tokens, and no numbers to normalize."""
        return self.inputs.dtype == torch.int64

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        """Return the chosen samples on a device: normalized float32 inputs (or ids), and labels.

        Bytes travel to a GPU as bytes, and become floats there: once with the whole split, if there
        is room for it, or from pinned memory and without blocking.
        """
        device = torch.device(device)
        inputs, labels = self._near(device)
        images = normalize(pick_rows(inputs, indices, device), self.mean, self.std)
        return images, _targets(pick_rows(labels, indices, device))

    def _near(self, device: torch.device) -> Batch:
        """Return all inputs and labels: on a GPU that has room for them, else where they are."""
        here = self.inputs, self.labels
        if device.type == "cpu" or sum(
            values.nbytes for values in here
        ) > MOST_STAYING * total_memory(device):
            return here
        staying = _STAYING.setdefault(self, {})
        if device not in staying:
            staying[device] = self.inputs.to(device), self.labels.to(device)
        return staying[device]

    def batches(
        self,
        indices: Tensor,
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
        edits: Edits | None = None,
    ) -> Iterator[Batch]:
        """Load batches of these sizes, as `batch` does.

        Small ones are gathered together, as views of one tensor.

        With `edits`, one seed for each index, images are changed one by one before they are
        normalized.
        """
        start = 0
        # to be sent once; images are changed on the CPU
        if edits is None:
            indices = indices.to(self._near(torch.device(device))[0].device)
        for portion in _portions(sizes, MOST_TOGETHER // max(self.inputs[:1].numel(), 1)):
            end = start + sum(portion)
            chosen = indices[start:end]
            if edits is None:
                inputs, labels = self.batch(chosen, device)
            else:
                inputs, labels = self._edited(chosen, device, edits[start:end])
            yield from zip(inputs.split(portion), labels.split(portion), strict=True)
            start = end

    def _edited(self, indices: Tensor, device: torch.device | str, edits: Edits) -> Batch:
        near = torch.device("cpu")
        columns = [[*pick_rows(self.inputs, indices, near)]]
        if self.targets == LABEL_MAPS:
            columns.append(
                [label_map(classes) for classes in pick_rows(self.labels, indices, near)]
            )
        size = self.inputs.shape[-2], self.inputs.shape[-1]
        samples = [*zip(*columns, strict=True)]
        images, maps = stack_samples(edits.augmentation.edit(samples, edits.seeds.tolist(), size))
        if maps is None:
            labels = pick_rows(self.labels, indices, torch.device(device))
        else:
            labels = maps.to(device)
        return normalize(images.to(device), self.mean, self.std), _targets(labels)

    def select(self, indices: NDArray[np.int64]) -> Self:
        """Return a new split with copies of the chosen samples."""
        chosen = torch.from_numpy(indices)
        if self.domains is None:
            domains = None
        else:
            domains = self.domains[chosen]
        return replace(
            self, inputs=self.inputs[chosen], labels=self.labels[chosen], domains=domains
        )

    def renumbered(self, numbers: Tensor) -> "Split":
        """Return the split with `numbers` in place of the classes 0, 1, ..., or float targets at
        these places.
        """
        if self.targets == FLOATS:
            return replace(self, labels=self.labels[:, numbers.argsort()])
        return replace(self, labels=renumbered_classes(self.labels, numbers))

    def resized(self, side: int) -> "Split":
        """Return the split with images of another size."""
        if self.inputs.dim() != 4:
            raise ValueError(
                "image-size is for images, not for inputs of the shape "
                f"{tuple(self.inputs.shape[1:])}"
            )
        labels = self.labels
        if self.is_dense:
            raise ValueError("image-size would scale the images and not their float targets")
        if self.targets == LABEL_MAPS:
            one = F.interpolate(labels[:, None].float(), size=(side, side), mode="nearest-exact")
            labels = one.squeeze(1).to(labels.dtype)
        return replace(self, inputs=resize(self.inputs, side), labels=labels)

    @property
    def is_scaled(self) -> bool:
        """Whether all inputs are from 0 to 1 when they are measured."""
        if self.inputs.is_floating_point():
            return bool(((self.inputs >= 0) & (self.inputs <= 1)).all())
        return not self.has_ids

    def moments(self) -> tuple[Channels, Channels]:
        """Return mean and biased variance of every channel, for pixels from 0 to 1; of ids there
        are none.
        """
        if self.has_ids:
            return ((), ())
        return moments(self.inputs)


def renumbered_classes(classes: Tensor, numbers: Tensor) -> Tensor:
    """Return `numbers` in place of the classes 0, 1, ...; pixels without a class stay so."""
    chosen = numbers[classes.long().clamp(min=0)].to(classes.dtype)
    return chosen.where(classes != IGNORED, IGNORED)


def _targets(labels: Tensor) -> Tensor:
    """Return labels as losses take them."""
    if labels.is_floating_point():
        return labels
    return labels.long()


#: by device, the inputs and labels that are there
_STAYING: WeakKeyDictionary[Split, dict[torch.device, Batch]] = WeakKeyDictionary()


def _portions(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Group sizes such that each group has at most `most` samples, or one size."""
    portion: list[int] = []
    count = 0
    for size in sizes:
        if portion and count + size > most:
            yield portion
            portion = []
            count = 0
        portion.append(size)
        count += size
    if portion:
        yield portion


def side_of(shape: Sequence[int]) -> int:
    """Return the side of square images of a shape; 1 where samples have nothing but channels."""
    if len(shape) > 1:
        return shape[-1]
    return 1


@dataclass(frozen=True, eq=False)
class Data:
    """A training and a test split of one task.

    A domain's number is its position in `domain_names`. `class_names` is empty, or a class's number
    is its position. `task` is what the targets are for: `classification`, `segmentation`,
    `regression` or one that is registered. In regression `num_classes` is the number of targets of
    a sample.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    domain_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    task: str = "classification"

    def __post_init__(self) -> None:
        if len(self.class_names) not in (0, self.num_classes):
            raise ValueError(
                f"{self.name}: {len(self.class_names)} names for {self.num_classes} classes"
            )
        train = self.train.inputs.dtype
        test = self.test.inputs.dtype
        if train != test:
            raise ValueError(
                f"{self.name}: training inputs are {train}, test inputs {test}: give both in one "
                "type"
            )
        for split in (self.train, self.test):
            is_float = split.targets == FLOATS
            is_usual = self.task == USUAL_TASKS[split.targets]
            # those that are registered have classes, of samples or of pixels
            is_registered = self.task not in USUAL_TASKS.values() and not is_float
            width = split.labels.shape[1:].numel()
            if not (is_usual or is_registered) or (is_float and width != self.num_classes):
                actual = f"{tuple(split.labels.shape)}, {split.labels.dtype}"
                raise ValueError(
                    f"{self.name}: labels of {self.num_classes} for {self.task} cannot be {actual}"
                )
            if not is_float:
                _check_range(f"{self.name}: labels", split.counted, self.num_classes)
            if (split.domains is None) == bool(self.domain_names):
                raise ValueError(
                    f"{self.name}: domain names and the domains of both splits go together"
                )
            if split.domains is not None:
                _check_range(f"{self.name}: domains", split.domains, len(self.domain_names))

    def __str__(self) -> str:
        sizes = f"{len(self.train):,} training and {len(self.test):,} test samples"
        unit = "classes"
        if self.train.targets == FLOATS:
            unit = "targets"
        classes = f"{self.num_classes} {unit}{_listed(self.class_names)}"
        if self.train.domains is None:
            return f"{self.name}: {sizes}; {classes}"
        counts = torch.bincount(self.train.domains.cpu(), minlength=len(self.domain_names)).tolist()
        shares = [
            f"{name} {count:,}" for name, count in zip(self.domain_names, counts, strict=True)
        ]
        return f"{self.name}: {sizes}; {classes}; {len(shares)} domains" + _listed(shares)

    @property
    def in_channels(self) -> int:
        """Number of channels of an image, or of values of another sample."""
        return self.train.inputs.shape[1]

    @property
    def image_size(self) -> int:
        """Side of a square image, in pixels; 1 where samples have nothing but channels."""
        return side_of(self.train.inputs.shape[1:])

    def resized(self, side: int) -> "Data":
        """Return the data with images of another size."""
        return replace(self, train=self.train.resized(side), test=self.test.resized(side))

    def repeated(self, channels: int) -> "Data":
        """Return grey images with so many channels, all views of their one.

        A ValueError if they have several.
        """
        if self.in_channels != 1:
            raise ValueError(
                f"{self.name}: channels={channels} repeats grey images, and these have "
                f"{self.in_channels}"
            )
        splits = self.train, self.test
        inputs = [split.inputs.expand(-1, channels, *split.inputs.shape[2:]) for split in splits]
        train, test = (
            replace(split, inputs=values) for split, values in zip(splits, inputs, strict=True)
        )
        return replace(self, train=train, test=test)

    def standardized(self) -> "Data":
        """Return the data normalized by the training split's mean and standard deviation.

        Tensors are shared.
        """
        if self.train.has_ids:
            return self
        mean, variance = self.train.moments()
        return normalized(self, mean, deviations(variance))

    def share(self) -> bool:
        """Move tensors into memory that worker processes can map; return whether they are there.

        They are not where memory lacks room for them, and where tensors are on another device or
        images stay in files.
        """
        splits = self.train, self.test
        columns = [
            each
            for split in splits
            for each in (split.inputs, split.labels, split.domains)
            if each is not None
        ]
        if any(column.device.type != "cpu" for column in columns):
            return False
        try:
            for column in columns:
                if not column.is_shared():
                    # not in place: the memory that it had may be that of a user's array
                    column.set_(column.clone().share_memory_())
        except RuntimeError:
            return False
        return True

    def validation_split(self, fraction: float, seed: int) -> "Data":
        """Return the data with a share of every class (and domain) of the training split as test
        split.

        So options can be tuned without the test split. The same arguments give the same object.
        """
        return _validation_split(self, fraction, seed)


def stratified(
    strata: NDArray[np.int64], count: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return the sorted positions of `count` samples, from every stratum its share to within one
    sample.
    """
    order = np.lexsort((generator.random(len(strata)), strata))
    # evenly spaced ticks on the samples, which are sorted by stratum and in random order within a
    # stratum
    ticks = np.arange(len(strata) + 1) * count // len(strata)
    return np.sort(order[np.diff(ticks) == 1])


@lru_cache(maxsize=2)
def _validation_split(data: Data, fraction: float, seed: int) -> Data:
    split = data.train
    count = round(fraction * len(split))
    if not 0 < count < len(split):
        raise ValueError(
            f"{data.name}: a share of {fraction} of {len(split)} samples leaves one side empty"
        )
    if split.targets:
        strata = np.zeros(len(split), np.int64)
    else:
        strata = split.labels.numpy(force=True)
    if split.domains is not None:
        strata = strata * len(data.domain_names) + split.domains.numpy(force=True)
    held_out = stratified(strata, count, numpy_generator(seed, "validation"))
    kept = np.setdiff1d(np.arange(len(split)), held_out, assume_unique=True)
    return replace(data, train=split.select(kept), test=split.select(held_out))


def _listed(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = names[:MOST_NAMES]
    if len(names) > MOST_NAMES:
        shown = [*shown, "..."]
    return f" ({', '.join(shown)})"


def _check_range(what: str, values: Tensor, count: int) -> None:
    if len(values) == 0:
        return
    lowest = int(values.min())
    highest = int(values.max())
    if lowest < 0 or highest >= count:
        raise ValueError(f"{what} must be from 0 to {count - 1}, not {lowest} to {highest}")


def renumbered(data: Data, class_names: Sequence[str]) -> Data:
    """Return the data with each class's number its position in a list, which may name further
    classes; float targets are put in the order of the list.

    A class that the list does not name is a ValueError, and so are classes without names, and
    float targets that are fewer than the list names.
    """
    if data.class_names == tuple(class_names):
        return data
    check_names(data, class_names)
    numbers = torch.tensor([list(class_names).index(name) for name in data.class_names])
    train = data.train.renumbered(numbers)
    test = data.test.renumbered(numbers)
    return replace(
        data, train=train, test=test, num_classes=len(class_names), class_names=tuple(class_names)
    )


def check_names(data: Data, class_names: Sequence[str]) -> None:
    """Refuse data that cannot be numbered by this list with a ValueError, as `renumbered` says."""
    if not data.class_names:
        raise ValueError(
            f"{data.name}: its classes have no names, so they cannot be numbered by name"
        )
    for name in data.class_names:
        if name not in class_names:
            raise ValueError(f"{data.name}: its class {name!r} is none of {', '.join(class_names)}")
    lacking = [name for name in class_names if name not in data.class_names]
    if lacking and data.train.targets == FLOATS:
        raise ValueError(f"{data.name}: its samples have no target {lacking[0]!r}")


def normalized(data: Data, mean: Channels, std: Channels) -> Data:
    """Return the data with this mean and standard deviation, one number a channel, in place of
    their own.
    """
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != data.in_channels:
            raise ValueError(
                f"{data.name}: {name} has {len(numbers)} numbers for {data.in_channels} channels"
            )
    train, test = (replace(split, mean=mean, std=std) for split in (data.train, data.test))
    return replace(data, train=train, test=test)


@lru_cache(maxsize=2)
def leave_out(data: Data, domain: str) -> tuple[Data, Split]:
    """Return the data without a domain's training samples, and these.

    The test samples are the domain's alone. What was normalized by all training samples is
    normalized by those that are left.
    """
    if domain not in data.domain_names:
        raise ValueError(
            f"{data.name} has no domain {domain!r}; it has {', '.join(data.domain_names) or 'none'}"
        )
    number = data.domain_names.index(domain)
    train = data.train
    assert train.domains is not None
    assert data.test.domains is not None
    here, tested = (
        column.numpy(force=True) == number for column in (train.domains, data.test.domains)
    )
    left = replace(
        data,
        train=train.select(np.flatnonzero(~here)),
        test=data.test.select(np.flatnonzero(tested)),
    )
    mean, variance = train.moments()
    is_own = np.allclose([*train.mean, *train.std], [*mean, *deviations(variance)])
    return left.standardized() if is_own else left, train.select(np.flatnonzero(here))


def without_domains(data: Data) -> Data:
    """Return the data as one domain."""
    train, test = (replace(split, domains=None) for split in (data.train, data.test))
    return replace(data, train=train, test=test, domain_names=())
