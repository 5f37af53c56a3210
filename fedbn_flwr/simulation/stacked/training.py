"""One round of local training of several clients at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import BNClient, Reply, frozen_parts, layerwise_mode, training
from fedbn_flwr.client.batch_plan import BatchLoader
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.precision import autocast, products
from fedbn_flwr.client.rules import Session, rules_for
from fedbn_flwr.layerwise import Exchange, OwnRandomness, shared_statistics
from fedbn_flwr.simulation.stacked.dropout import Dropouts
from fedbn_flwr.simulation.stacked.model import Rows, Stack, stacked
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState
from fedbn_flwr.wire import Instruction


class CannotStackError(RuntimeError):
    """These clients must train one after another, and why."""


@dataclass(frozen=True)
class Part:
    """Clients whose batches have the same number of samples in one step."""

    rows: Rows
    inputs: Tensor
    targets: Tensor


def train_together(
    clients: Sequence[BNClient],
    structure: nn.Module,
    received: Sequence[Mapping[str, State]],
    instruction: Instruction,
    exchange: Exchange | None = None,
) -> list[Reply]:
    """What each client's `train` replies, up to rounding; nobody's memory changes unless all are at their end.

    The clients have models like `structure`, which is not used by anybody else meanwhile. They should come sorted by
    their number of steps, the largest first: those that are at their end wait, unchanged, for the others.
    """
    local = state.group_keys(structure, instruction.keep_local)
    with norm.freeze(structure, **frozen_parts(instruction.freeze)), products(instruction):
        structure.train()
        stack = Stack(structure, _states(clients, received, local, structure))
        memory = StackedMemory([client.memory for client in clients])
        optimizer = training.make_optimizer(stack, instruction)
        groups = {name: [each[name] for each in received] for name in received[0] if name != wire.ARRAYS}
        others = {name: stacked(states) for name, states in groups.items()}
        session = Session(stack, optimizer, instruction, others, memory, local, structure=structure)
        losses = _learn(clients, stack, session, exchange)
    if local:
        memory.store(wire.PERSONAL, {name: value for name, value in stack.state_dict().items() if name in local})
    memory.write()
    stays = local | state.group_keys(structure, instruction.omit)
    shared = {name: value for name, value in stack.state_dict().items() if name not in stays}
    records = {
        name: FlatState.copies_of(values, stack.clients)
        for name, values in {wire.ARRAYS: shared, **session.records}.items()
    }
    return [
        client.reply({wire.TRAIN_LOSS: loss}, instruction, {name: states[row] for name, states in records.items()})
        for row, (client, loss) in enumerate(zip(clients, losses.tolist(), strict=True))
    ]


def _states(
    clients: Sequence[BNClient], received: Sequence[Mapping[str, State]], local: set[str], structure: nn.Module
) -> list[State]:
    """What each client's model starts from."""
    states: list[State] = []
    for client, groups in zip(clients, received, strict=True):
        personal = client.memory.personal(local)
        states.append({**groups[wire.ARRAYS], **personal} if personal else groups[wire.ARRAYS])
    for each in {id(each): each for each in states}.values():
        state.check(structure, each)
    return states


def _learn(clients: Sequence[BNClient], stack: Stack, session: Session, exchange: Exchange | None) -> Tensor:
    instruction = session.instruction
    plans = [client.plan(instruction, stack.structure) for client in clients]
    rounds = _Round(clients, stack, session, plans, exchange)
    session.steps = rounds.steps
    rules = rules_for(instruction)
    for rule in rules:
        rule.begin(session)
    losses = training.train(rounds.batches(), rounds.loss_of, session.optimizer, [rule.adjust for rule in rules])
    rounds.restore()
    for rule in rules:
        rule.finish(session)
    return losses


@dataclass
class _Round:
    """The batches of several clients, step by step."""

    clients: Sequence[BNClient]
    stack: Stack
    session: Session
    plans: Sequence[BatchLoader]
    exchange: Exchange | None
    #: rows of clients that have taken all their steps, and what is to be put back there
    finished: list[tuple[slice, list[tuple[Tensor, Tensor]]]] = field(default_factory=list)
    first: bool = True

    def __post_init__(self) -> None:
        lengths = [len(plan) for plan in self.plans]
        if lengths != sorted(lengths, reverse=True):
            raise ValueError("clients that train together come in the order of their steps, the largest number first")
        self.steps = lengths[0] if lengths[0] == lengths[-1] else torch.tensor(lengths)
        seeds = [client.step_seed(self.session.instruction) for client in self.clients]
        self.streams = [OwnRandomness(seed) for seed in seeds]
        self.dropouts = Dropouts(self.stack.structure)

    def batches(self) -> Iterator[list[Part]]:
        """For every step the batches of those clients that take it."""
        active = len(self.plans)
        for step in range(len(self.plans[0])):
            now = sum(len(plan) > step for plan in self.plans)
            if now < active:
                self._retire(slice(now, active))
            active = now
            yield [self._part(rows, step) for rows in _by_size([plan.sizes[step] for plan in self.plans[:now]])]
            if self.first and self.exchange and self.session.instruction.fresh_optimizer:
                self.session.optimizer.state.clear()
            self.first = False

    def loss_of(self, parts: list[Part]) -> tuple[Tensor, int | Tensor]:
        """Every client's loss and number of samples, zeros where a client takes no step."""
        if len(parts) == 1 and parts[0].rows == slice(0, self.stack.clients):
            return self._losses(parts[0]), parts[0].targets.shape[1]
        counts = torch.zeros(self.stack.clients, dtype=torch.int64)
        losses: Tensor | float = 0.0
        for part in parts:
            found = self._losses(part)
            counts[part.rows] = part.targets.shape[1]
            rows = torch.tensor(_numbers(part.rows), device=found.device)
            losses = found.new_zeros(self.stack.clients).index_add(0, rows, found) + losses
        assert isinstance(losses, Tensor)
        return losses, counts

    def restore(self) -> None:
        """Put back what clients had at their own ends: the optimizer has gone on moving their rows."""
        for rows, values in self.finished:
            for value, kept in values:
                value[rows] = kept

    def _losses(self, part: Part) -> Tensor:
        instruction, device = self.session.instruction, part.inputs.device
        streams = [self.streams[row] for row in _numbers(part.rows)]
        with self.dropouts.drawing(streams), autocast(instruction, device):
            return self.stack.losses(
                part.rows, (part.inputs, part.targets), self.clients[0].loss_function, self._around()
            )

    def _around(self) -> Callable[[], AbstractContextManager[Any]]:
        if not (self.first and self.exchange):
            return nullcontext
        mode = layerwise_mode(self.session.instruction)
        return partial(shared_statistics, self.stack.structure, self.exchange, mode)

    def _part(self, rows: Rows, step: int) -> Part:
        plans = [self.plans[row] for row in _numbers(rows)]
        first, size = plans[0], plans[0].sizes[step]
        if all(plan.split is first.split for plan in plans):
            chosen = torch.cat([plan.chosen[step] for plan in plans])
            inputs, targets = first.split.batch(chosen, first.device)
        else:
            each = [plan.split.batch(plan.chosen[step], first.device) for plan in plans]
            inputs, targets = (torch.cat(parts) for parts in zip(*each, strict=True))
        inputs, targets = inputs.unflatten(0, (len(plans), size)), targets.unflatten(0, (len(plans), size))
        if self.session.instruction.augmentation != "none":
            inputs = torch.stack([plan.augmented(own) for own, plan in zip(inputs, plans, strict=True)])
        return Part(rows, inputs, targets)

    def _retire(self, rows: slice) -> None:
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
    """Rows one by one."""
    if isinstance(rows, slice):
        return range(rows.start, rows.stop)
    numbers: list[int] = rows.tolist()
    return numbers


def _by_size(sizes: Sequence[int]) -> list[Rows]:
    """The rows of equal sizes; as a slice where they follow each other."""
    found: list[Rows] = []
    for size in dict.fromkeys(sizes):
        rows = [row for row, own in enumerate(sizes) if own == size]
        together = rows[-1] - rows[0] + 1 == len(rows)
        found.append(slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows))
    return found


class StackedMemory(Memory):
    """The memories of several clients, which hold the same groups and entries, or none of them a group."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        super().__init__(RecordDict())
        self._memories, self._stored = memories, dict[str, State]()

    def recall(self, group: str) -> State:
        """Stacked."""
        states = [memory.recall(group) for memory in self._memories]
        if any(each.keys() != states[0].keys() for each in states):
            raise CannotStackError(f"the clients remember different entries of {group!r}")
        return stacked(states)

    def store(self, group: str, values: State) -> None:
        """Kept until `write`."""
        self._stored[group] = values

    def write(self) -> None:
        """Into every client's memory its own rows, in memory of their own."""
        for group, values in self._stored.items():
            for memory, own in zip(self._memories, FlatState.copies_of(values, len(self._memories)), strict=True):
                memory.store(group, own)
