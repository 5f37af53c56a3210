"""Which samples each local step uses: a function of the instruction and of a generator, decided before training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedbn_flwr.client import training
from fedbn_flwr.data import Split, augment
from fedbn_flwr.wire import Instruction


def plan(
    count: int, instruction: Instruction, generator: torch.Generator, merge_single: bool
) -> tuple[Tensor, list[int]]:
    """The positions (in the client's own samples) of the round's mini-batches, one after another, and their sizes.

    A last short batch is kept. With `merge_single`, for models whose BN cannot take one sample, a last batch of one
    is merged into the one before.
    """
    _check(count, instruction)
    size = instruction.batch_size
    if instruction.replacement:
        steps = count_steps(count, instruction, merge_single)
        drawn = [torch.randint(count, (size,), generator=generator) for _ in range(steps)]
        return torch.cat(drawn), [size] * steps
    epoch = _sizes(count, size, merge_single)
    steps = instruction.local_steps or instruction.local_epochs * len(epoch)
    epochs = -(-steps // len(epoch))
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    sizes = (epoch * epochs)[:steps]
    return (torch.cat(orders) if epochs > 1 else orders[0])[: sum(sizes)], sizes


def count_steps(count: int, instruction: Instruction, merge_single: bool) -> int:
    """The length of such a plan."""
    _check(count, instruction)
    merged = merge_single and not instruction.replacement and leaves_one(count, instruction.batch_size)
    return instruction.local_steps or instruction.local_epochs * (-(-count // instruction.batch_size) - merged)


def first_size(count: int, instruction: Instruction, merge_single: bool) -> int:
    """The number of samples of such a plan's first mini-batch."""
    size = instruction.batch_size
    if instruction.replacement:
        return size
    return count if merge_single and count == size + 1 and leaves_one(count, size) else min(count, size)


def chunks(values: Tensor, size: int) -> list[Tensor]:
    """Split into batches; a last one of a single sample, which BN may not be able to take, joins the one before."""
    return list(values.split(_sizes(len(values), size, merge_single=True)))


def leaves_one(count: int, size: int) -> bool:
    """Whether a last batch of a single sample is left over."""
    return 1 < size < count and count % size == 1


def _check(count: int, instruction: Instruction) -> None:
    if count < 1:
        raise ValueError("a client needs at least one sample to train")
    if instruction.batch_size < 1 or max(instruction.local_steps, instruction.local_epochs) < 1:
        raise ValueError("batch-size, and one of local-steps and local-epochs, must be at least 1")


def _sizes(count: int, size: int, merge_single: bool) -> list[int]:
    """Of the batches that are made of so many samples."""
    if merge_single and leaves_one(count, size):
        return [size] * (count // size - 1) + [size + 1]
    rest = count % size
    return [size] * (count // size) + [rest] * bool(rest)


@dataclass(frozen=True)
class Plan:
    """A client's mini-batches of one round; each walk over them goes on drawing augmentations."""

    split: Split
    device: torch.device
    augmentation: str
    #: the samples of all mini-batches, one after another, and the size of each mini-batch
    samples: Tensor
    sizes: list[int]
    generator: torch.Generator

    @cached_property
    def chosen(self) -> Sequence[Tensor]:
        """The samples of each mini-batch."""
        chosen: tuple[Tensor, ...] = self.samples.split(self.sizes)
        return chosen

    def first(self) -> training.Batch:
        """Return only the first mini-batch, without loading the others."""
        return next(iter(replace(self, samples=self.chosen[0], sizes=self.sizes[:1])))

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[training.Batch]:
        for inputs, targets in self.split.batches(self.samples, self.sizes, self.device):
            yield augment(self.augmentation, inputs, self.generator), targets
