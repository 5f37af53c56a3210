"""The mini-batch steps of stacked clients, also where their numbers of steps or samples differ."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.client import BNClient, layerwise_mode
from fedbn_flwr.client.batch_plan import BatchLoader, load_groups
from fedbn_flwr.client.precision import autocast
from fedbn_flwr.client.rules import Session
from fedbn_flwr.layerwise import CorrectedClients, Exchange, OwnRandomness, shared_statistics
from fedbn_flwr.simulation.stacked.batch_norm import apply_shared
from fedbn_flwr.simulation.stacked.dropout import Dropouts
from fedbn_flwr.simulation.stacked.model import Rows, Stack
from fedbn_flwr.simulation.stacked.node_memories import CannotStackError


@dataclass(frozen=True)
class Part:
    """The batches of one step of those clients whose batches have the same number of samples."""

    rows: Rows
    inputs: Tensor
    targets: Tensor


@dataclass
class StackedSteps:
    """The mini-batch steps of several clients, of which each may have its own number."""

    clients: Sequence[BNClient]
    stack: Stack
    session: Session
    plans: Sequence[BatchLoader]
    exchange: Exchange | None
    #: the clients' own corrections, where these stand for an exchange
    carried: CorrectedClients | None = None
    #: rows of clients that have taken all their steps; each tensor with what they had there at their end
    finished: list[tuple[slice, list[tuple[Tensor, Tensor]]]] = field(default_factory=list)
    first_step: bool = True

    def __post_init__(self) -> None:
        lengths = [len(plan) for plan in self.plans]
        if lengths != sorted(lengths, reverse=True):
            raise ValueError("clients that train together come in the order of their steps, the largest number first")
        self.steps = lengths[0] if lengths[0] == lengths[-1] else torch.tensor(lengths)
        seeds = [client.step_seed(self.session.instruction) for client in self.clients]
        self.streams = [OwnRandomness(seed) for seed in seeds]
        self.dropouts = Dropouts(self.stack.structure)

    def batches(self) -> Iterator[list[Part]]:
        """Iterate over the steps: for each, the batches of those clients that take it."""
        active, loaded = len(self.plans), self._loaded()
        for step in range(len(self.plans[0])):
            now = sum(len(plan) > step for plan in self.plans)
            if now < active:
                self._retire(slice(now, active))
            active = now
            yield [self._part(rows, *next(loaded)) for rows in self._groups(step)]
            if self.first_step and (self.exchange or self.carried) and self.session.instruction.fresh_optimizer:
                self.session.optimizer.state.clear()
            self.first_step = False

    def loss_of(self, parts: list[Part]) -> tuple[Tensor, int | Tensor]:
        """Return every client's loss and number of samples, zeros where a client takes no step."""
        if len(parts) == 1 and parts[0].rows == slice(0, self.stack.clients):
            return self._losses(parts[0]), parts[0].targets.shape[1]
        counts = torch.zeros(self.stack.clients, dtype=torch.int64)
        losses: Tensor | float = 0.0
        for part in parts:
            own = self._losses(part)
            counts[part.rows] = part.targets.shape[1]
            rows = torch.tensor(_numbers(part.rows), device=own.device)
            losses = own.new_zeros(self.stack.clients).index_add(0, rows, own) + losses
        assert isinstance(losses, Tensor)
        return losses, counts

    def restore(self) -> None:
        """Put back what clients had at their own ends, since the optimizer has gone on moving their rows."""
        for rows, values in self.finished:
            for value, kept in values:
                value[rows] = kept

    def _losses(self, part: Part) -> Tensor:
        instruction, device = self.session.instruction, part.inputs.device
        streams = [self.streams[row] for row in _numbers(part.rows)]
        with self.dropouts.drawing(streams), autocast(instruction, device):
            return self.stack.losses(
                part.rows, (part.inputs, part.targets), self.clients[0].loss_function, self._around(part.rows)
            )

    def _around(self, rows: Rows) -> Callable[[], AbstractContextManager[Any]]:
        exchange = self.carried.exchange(rows) if self.carried and self.first_step else self.exchange
        if not (self.first_step and exchange):
            return nullcontext
        mode = layerwise_mode(self.session.instruction)
        return partial(shared_statistics, self.stack.structure, exchange, mode, apply=apply_shared)

    def _groups(self, step: int) -> list[Rows]:
        """Return the rows that take a step, those with batches of one size together."""
        return _by_size([plan.sizes[step] for plan in self.plans if len(plan) > step])

    def _loaded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Load the batches of every group of every step, one after another; files are decoded ahead."""
        steps = range(len(self.plans[0]))
        return load_groups(self.plans, [(_numbers(rows), step) for step in steps for rows in self._groups(step)])

    def _part(self, rows: Rows, inputs: Tensor, targets: Tensor) -> Part:
        plans = [self.plans[row] for row in _numbers(rows)]
        shape = len(plans), len(targets) // len(plans)
        inputs, targets = inputs.unflatten(0, shape), targets.unflatten(0, shape)
        if self.session.instruction.augmentation != "none":
            inputs = torch.stack([plan.augmented(own) for own, plan in zip(inputs, plans, strict=True)])
        return Part(rows, inputs, targets)

    def _retire(self, rows: slice) -> None:
        """Keep what these clients have at their end, to be put back."""
        moving = [value.detach() for _, value in self.stack.named_parameters()]
        kept = [
            value
            for kinds in self.session.optimizer.state.values()
            for value in kinds.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        if self.session.instruction.momentum_state != "none" and self.session.instruction.momentum and not kept:
            raise CannotStackError("a client is at its end before there is momentum, which it would get all the same")
        self.finished.append((rows, [(value, value[rows].clone()) for value in moving + kept]))


def _numbers(rows: Rows) -> Sequence[int]:
    """Return the numbers of the rows."""
    if isinstance(rows, slice):
        return range(rows.start, rows.stop)
    numbers: list[int] = rows.tolist()
    return numbers


def _by_size(sizes: Sequence[int]) -> list[Rows]:
    """Return the rows of each size; as a slice where they follow each other."""
    groups: list[Rows] = []
    for size in dict.fromkeys(sizes):
        rows = [row for row, own in enumerate(sizes) if own == size]
        together = rows[-1] - rows[0] + 1 == len(rows)
        groups.append(slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows))
    return groups
