"""The samples of each local step, drawn from a generator before training starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedbn_flwr.client import training
from fedbn_flwr.data import Split, augment
from fedbn_flwr.wire import Instruction


@dataclass(frozen=True)
class BatchPlan:
    """Positions in a client's own samples, by mini-batch. Iterating over a plan gives each mini-batch's positions."""

    #: the positions of all mini-batches, one after another
    positions: Tensor
    #: the number of positions in each mini-batch
    sizes: list[int]

    def __len__(self) -> int:
        """Number of mini-batches."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        """Return the positions of each mini-batch, as views."""
        return iter(self.positions.split(self.sizes))


def plan(count: int, instruction: Instruction, generator: torch.Generator, merge_single: bool) -> BatchPlan:
    """Draw the mini-batches of one round for a client with `count` samples.

    A last short batch is kept. With `merge_single`, for models whose BN cannot take one sample, a last batch of one
    is merged into the one before.
    """
    _check(count, instruction)
    size = instruction.batch_size
    if instruction.replacement:
        steps = count_steps(count, instruction, merge_single)
        drawn = [torch.randint(count, (size,), generator=generator) for _ in range(steps)]
        return BatchPlan(torch.cat(drawn), [size] * steps)
    epoch = _sizes(count, size, merge_single)
    steps = instruction.local_steps or instruction.local_epochs * len(epoch)
    epochs = -(-steps // len(epoch))
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    sizes = (epoch * epochs)[:steps]
    return BatchPlan((torch.cat(orders) if epochs > 1 else orders[0])[: sum(sizes)], sizes)


def count_steps(count: int, instruction: Instruction, merge_single: bool) -> int:
    """Number of mini-batches that `plan` would draw."""
    _check(count, instruction)
    merged = merge_single and not instruction.replacement and leaves_one(count, instruction.batch_size)
    return instruction.local_steps or instruction.local_epochs * (-(-count // instruction.batch_size) - merged)


def first_size(count: int, instruction: Instruction, merge_single: bool) -> int:
    """Number of samples in the first mini-batch that `plan` would draw."""
    size = instruction.batch_size
    if instruction.replacement:
        return size
    return count if merge_single and count == size + 1 and leaves_one(count, size) else min(count, size)


def chunks(values: Tensor, size: int) -> list[Tensor]:
    """Split into batches of `size`. A last batch of one sample, which BN cannot always take, joins the one before."""
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
    """Batch sizes of one pass over `count` samples."""
    if merge_single and leaves_one(count, size):
        return [size] * (count // size - 1) + [size + 1]
    rest = count % size
    return [size] * (count // size) + [rest] * bool(rest)


@dataclass(frozen=True)
class BatchLoader:
    """Loads a client's mini-batches of one round. Every pass over them goes on drawing augmentations."""

    split: Split
    device: torch.device
    augmentation: str
    #: indices into `split`, of all mini-batches one after another
    samples: Tensor
    #: the number of samples in each mini-batch
    sizes: list[int]
    generator: torch.Generator

    @cached_property
    def chosen(self) -> Sequence[Tensor]:
        """Indices into `split`, one tensor a mini-batch."""
        chosen: tuple[Tensor, ...] = self.samples.split(self.sizes)
        return chosen

    def first(self) -> training.Batch:
        """Return only the first mini-batch, without loading the others."""
        return next(iter(replace(self, samples=self.chosen[0], sizes=self.sizes[:1])))

    def __len__(self) -> int:
        """Number of mini-batches."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[training.Batch]:
        """Load and augment one mini-batch after another."""
        for inputs, targets in self.split.batches(self.samples, self.sizes, self.device):
            yield self.augmented(inputs), targets

    def augmented(self, inputs: Tensor) -> Tensor:
        """Augment one mini-batch."""
        return augment(self.augmentation, inputs, self.generator, self.split.mean, self.split.std)
