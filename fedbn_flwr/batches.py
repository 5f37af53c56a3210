"""Which samples each local step uses: a function of the instruction and of a generator, decided before training."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from fedbn_flwr.wire import Instruction


def plan(count: int, instruction: Instruction, generator: torch.Generator, merge_single: bool) -> list[Tensor]:
    """The positions (in the client's own samples) of every mini-batch of the round.

    A last short batch is kept. With `merge_single`, for models whose BN cannot take one sample, a last batch of one
    is merged into the one before.
    """
    _check(count, instruction)
    if instruction.replacement:
        steps = instruction.local_steps or instruction.local_epochs * -(-count // instruction.batch_size)
        return [torch.randint(count, (instruction.batch_size,), generator=generator) for _ in range(steps)]
    epochs = _epochs(count, instruction.batch_size, generator, merge_single)
    if instruction.local_steps:
        return list(islice((batch for epoch in epochs for batch in epoch), instruction.local_steps))
    return [batch for epoch in islice(epochs, instruction.local_epochs) for batch in epoch]


def count_steps(count: int, instruction: Instruction, merge_single: bool) -> int:
    """The length of such a plan."""
    _check(count, instruction)
    merged = merge_single and not instruction.replacement and _joins(count, instruction.batch_size)
    return instruction.local_steps or instruction.local_epochs * (-(-count // instruction.batch_size) - merged)


def first_size(count: int, instruction: Instruction, merge_single: bool) -> int:
    """The number of samples of such a plan's first mini-batch."""
    size = instruction.batch_size
    if instruction.replacement:
        return size
    return count if merge_single and count == size + 1 and _joins(count, size) else min(count, size)


def chunks(values: Tensor, size: int) -> list[Tensor]:
    """Split into batches; a last one of a single sample, which BN may not be able to take, joins the one before."""
    parts = list(values.split(size))
    if _joins(len(values), size):
        last = parts.pop()
        parts[-1] = torch.cat([parts[-1], last])
    return parts


def _joins(count: int, size: int) -> bool:
    """Whether a last batch of a single sample is left over."""
    return 1 < size < count and count % size == 1


def _check(count: int, instruction: Instruction) -> None:
    if count < 1:
        raise ValueError("a client needs at least one sample to train")
    if instruction.batch_size < 1 or max(instruction.local_steps, instruction.local_epochs) < 1:
        raise ValueError("batch-size, and one of local-steps and local-epochs, must be at least 1")


def _epochs(count: int, size: int, generator: torch.Generator, merge_single: bool) -> Iterator[list[Tensor]]:
    while True:
        order = torch.randperm(count, generator=generator)
        yield chunks(order, size) if merge_single else list(order.split(size))
