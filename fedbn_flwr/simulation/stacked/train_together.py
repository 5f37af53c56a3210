"""One round of local training of several clients at once, also where their numbers of steps or
samples differ.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient, captured, training
from fedbn_flwr.client.batch_plan import BatchLoader, augment_together, load_groups
from fedbn_flwr.client.reply import Metrics
from fedbn_flwr.client.rules import Session, rules_for
from fedbn_flwr.client.steady import steady
from fedbn_flwr.device import Rows, rows_on
from fedbn_flwr.layerwise import Exchange, shared_statistics
from fedbn_flwr.layerwise.carried import CorrectedClients
from fedbn_flwr.layerwise.one_stack import OneStackExchange
from fedbn_flwr.randomness import OwnRandomness
from fedbn_flwr.simulation.reply_pool import Job, Trained
from fedbn_flwr.simulation.stacked.model import Stack, StackedMemory, stacked
from fedbn_flwr.simulation.stacked.stacked_layers import apply_shared
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction

#: makes a stack like a model, of clients that start from these states
MakeStack = Callable[[nn.Module, Sequence[State]], Stack]


def train_together(
    jobs: Sequence[Job],
    structure: nn.Module,
    make_stack: MakeStack = Stack,
    exchange: Exchange | None = None,
) -> Trained:
    """Train the clients of jobs of one instruction at once.

    Return what each would reply alone, up to rounding.

    Nobody's memory changes unless all come to their end. The clients have models like `structure`,
    which nobody else uses meanwhile. They come in the order of their numbers of steps, the largest
    first: those that are at their end wait, unchanged, for the others.
    """
    clients = [job.client for job in jobs]
    received = [job.received for job in jobs]
    instruction = jobs[0].instruction
    stays = state.group_keys(structure, instruction.stays)
    begins = _states(clients, received, stays, structure)
    before = _reported(wire.RECEIVED_LOSS, clients, structure, begins, instruction)
    with training.frozen(structure, instruction), training.products(instruction):
        structure.train()
        stack = make_stack(structure, begins)
        memory = StackedMemory([client.memory for client in clients])
        optimizer = training.make_optimizer(stack, instruction)
        others = {}
        for name in received[0]:
            if name != wire.ARRAYS:
                others[name] = stacked([records[name] for records in received])
        session = Session(stack, optimizer, instruction, others, memory, stays, structure=structure)
        losses = _learn(clients, stack, session, exchange)
    trained = stack.state_dict()
    if stays:
        memory.store(wire.STAYS, {name: trained[name] for name in trained if name in stays})
    memory.write()
    unsent = stays | state.group_keys(structure, instruction.omit)
    shared = {name: value for name, value in trained.items() if name not in unsent}

    def end(row: int) -> State:
        return {name: values[row] for name, values in trained.items()}

    ends = map(end, range(len(clients)))
    after = _reported(wire.LOCAL_LOSS, clients, structure, ends, instruction)
    metrics: list[Metrics] = [
        {wire.TRAIN_LOSS: loss, **before[row], **after[row]} for row, loss in enumerate(losses)
    ]
    for name, value in session.metrics.items():
        for row, own in enumerate(_rows_of(value, len(clients))):
            metrics[row][name] = own
    replies = [client.reply(metrics[row], instruction, {}) for row, client in enumerate(clients)]
    return Trained(jobs, replies, {wire.ARRAYS: shared, **session.records})


def _reported(
    metric: str,
    clients: Sequence[BNClient],
    structure: nn.Module,
    states: Iterable[State],
    instruction: Instruction,
) -> list[Metrics]:
    """Return the loss of each client's state, if the instruction asks for this metric."""
    if instruction.report_loss != metric:
        return [{} for _ in clients]
    reported = []
    for client, own in zip(clients, states, strict=True):
        state.load(structure, own)
        reported.append(client.reported_loss(metric, structure, instruction))
    return reported


def _rows_of(value: Any, clients: int) -> Sequence[Any]:
    """Return what each client reports: a row of a tensor with a row for each, or else the same for
    all.
    """
    if isinstance(value, Tensor) and value.dim() and len(value) == clients:
        rows: list[Any] = value.tolist()
        return rows
    return [value.item() if isinstance(value, Tensor) else value] * clients


def _states(
    clients: Sequence[BNClient],
    received: Sequence[Mapping[str, State]],
    stays: set[str],
    structure: nn.Module,
) -> list[State]:
    """Return what each client's model starts from."""
    states: list[State] = []
    for client, groups in zip(clients, received, strict=True):
        personal = client.memory.personal(stays)
        states.append({**groups[wire.ARRAYS], **personal} if personal else groups[wire.ARRAYS])
    for start in {id(start): start for start in states}.values():
        state.check_fit(structure, start)
    return states


def _learn(
    clients: Sequence[BNClient], stack: Stack, session: Session, exchange: Exchange | None
) -> list[float]:
    instruction = session.instruction
    plans = [client.plan(instruction) for client in clients]
    carried = None
    if instruction.layerwise in wire.CARRIED_MODES:
        carried = stack.corrected
        carried.begin(session.received.get(wire.CARRIED, {}), clients[0].device)
    batches = StackedBatches(clients, stack, session, plans, exchange, carried)
    session.steps = batches.steps
    steady(session)
    rules = rules_for(instruction)
    for rule in rules:
        rule.begin(session)
    step = captured.steps(
        session,
        rules,
        batches.loss_of,
        clients[0].loss_function,
        clients[0].captured,
        batches.tensors_of,
        batches.batch_of,
        asks_nobody=carried is not None or isinstance(exchange, OneStackExchange),
        written=stack.corrected.written,
    )
    batches.draws_ahead = captured.replays(step)
    for batch in batches:
        step(batch)
    batches.restore()
    for rule in rules:
        rule.finish(session)
    if carried:
        values = carried.local_values()
        if values:
            session.records[wire.CARRIED] = values
    return batches.losses.means([sum(plan.sizes) for plan in plans])


@dataclass(frozen=True)
class BatchGroup:
    """The batches of one step of those clients whose batches have the same number of samples."""

    #: their numbers, and their rows of the stack
    clients: Sequence[int]
    rows: Rows
    #: inputs, targets, and the masks of dropout that were drawn ahead
    batch: captured.Tensors


@dataclass
class StackedBatches:
    """The mini-batches of several clients, of which each may have its own number, and the losses on
    them.
    """

    clients: Sequence[BNClient]
    stack: Stack
    session: Session
    plans: Sequence[BatchLoader]
    exchange: Exchange | None
    #: the clients' own corrections, where these stand for an exchange
    carried: CorrectedClients | None = None
    #: rows of clients that have taken all their steps; each tensor with what they had there at
    #: their end
    finished: list[tuple[slice, list[tuple[Tensor, Tensor]]]] = field(default_factory=list)
    first_step: bool = True
    #: whether steps may be captured, which must not draw
    draws_ahead: bool = False

    def __post_init__(self) -> None:
        self.lengths = lengths = [len(plan.sizes) for plan in self.plans]
        if lengths != sorted(lengths, reverse=True):
            raise ValueError(
                "clients that train together come in the order of their steps, the largest number "
                "first"
            )
        self.steps = lengths[0] if lengths[0] == lengths[-1] else torch.tensor(lengths)
        seeds = [client.step_seed(self.session.instruction) for client in self.clients]
        self.streams = [OwnRandomness(seed) for seed in seeds]
        self.losses = training.LossTotals(self.session, self.stack.clients, self.clients[0].device)

    def __iter__(self) -> Iterator[list[BatchGroup]]:
        """Iterate over the steps: for each, the batches of those clients that take it."""
        active = len(self.plans)
        loaded = self._loaded()
        for step in range(self.lengths[0]):
            now = sum(length > step for length in self.lengths)
            if now < active:
                self._retire(slice(now, active))
            active = now
            yield [self._batch_group(group, *next(loaded)) for group in self._groups(step)]
            self.first_step = False

    def loss_of(self, groups: list[BatchGroup]) -> Tensor:
        """Return the sum of the losses of all clients that take a step."""
        sums = []
        for group in groups:
            means = self._losses(group)
            self.losses.add(means, group.batch[1].shape[1], group.rows)
            sums.append(means.sum())
        return reduce(torch.add, sums)

    def tensors_of(self, groups: list[BatchGroup]) -> tuple[Hashable, captured.Tensors]:
        """Return which clients take a step, and what they take it on."""
        clients = tuple(str(group.clients) for group in groups)
        form: Hashable = ()
        if self.carried and self.first_step:
            form = self.carried.form()
        return (clients, form), tuple(value for group in groups for value in group.batch)

    def batch_of(self, groups: list[BatchGroup], tensors: captured.Tensors) -> list[BatchGroup]:
        """Return a step of the same clients on other tensors."""
        left = iter(tensors)
        return [replace(group, batch=tuple(islice(left, len(group.batch)))) for group in groups]

    def restore(self) -> None:
        """Put back what clients had at their own ends, since the optimizer has gone on moving their
        rows.
        """
        for rows, values in self.finished:
            for value, kept in values:
                value[rows] = kept

    def _losses(self, group: BatchGroup) -> Tensor:
        instruction = self.session.instruction
        device = group.batch[0].device
        loss_function = self.clients[0].loss_function
        with training.autocast(instruction, device):
            return self.stack.losses(
                group.rows,
                group.batch,
                loss_function,
                self._streams_of(group.clients),
                self._around(group.rows),
            )

    def _around(self, rows: Rows) -> Callable[[], AbstractContextManager[Any]]:
        # The context ends inside `vmap`, before the backward pass. It moves the running statistics
        # when it ends, and only `vmap` has them.
        if not self.first_step:
            return nullcontext
        exchange = self.exchange
        if self.carried:
            exchange = partial(self.carried, rows=rows)
        if not exchange:
            return nullcontext
        mode = training.layerwise_mode(self.session.instruction)
        return partial(shared_statistics, self.stack.structure, exchange, mode, apply=apply_shared)

    def _groups(self, step: int) -> list[Sequence[int]]:
        """Return the clients that take a step, those with batches of one size together."""
        return _by_size([plan.sizes[step] for plan in self.plans if len(plan.sizes) > step])

    def _loaded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Load the batches of every group of every step, one after another.

        Files are decoded ahead.
        """
        steps = range(self.lengths[0])
        return load_groups(
            self.plans, [(group, step) for step in steps for group in self._groups(step)]
        )

    def _batch_group(self, clients: Sequence[int], inputs: Tensor, targets: Tensor) -> BatchGroup:
        plans = [self.plans[client] for client in clients]
        shape = len(plans), len(targets) // len(plans)
        inputs = augment_together(plans, inputs.unflatten(0, shape))
        masks = []
        if self.draws_ahead:
            masks = self.stack.draw_masks(inputs, self._streams_of(clients))
        rows = rows_on(clients, inputs.device)
        return BatchGroup(clients, rows, (inputs, targets.unflatten(0, shape), *masks))

    def _streams_of(self, clients: Sequence[int]) -> list[OwnRandomness]:
        return [self.streams[client] for client in clients]

    def _retire(self, rows: slice) -> None:
        """Keep what these clients have at their end, to be put back."""
        moving = [value.detach() for _, value in self.stack.named_parameters()]
        kept = [
            value
            for kinds in self.session.optimizer.state.values()
            for value in kinds.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        self.finished.append((rows, [(value, value[rows].clone()) for value in moving + kept]))


def _by_size(sizes: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of each size; as a range where they follow each other."""
    groups: list[Sequence[int]] = []
    for size in dict.fromkeys(sizes):
        numbers = [number for number, other in enumerate(sizes) if other == size]
        together = range(numbers[0], numbers[-1] + 1)
        groups.append(together if len(together) == len(numbers) else numbers)
    return groups
