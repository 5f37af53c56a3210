"""The in-process `Grid` that trains clients as one stack of models, where it can."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from logging import INFO
from pathlib import Path

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common import log
from torch import nn

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.rules import rules_for
from fedbn_flwr.client.training import make_optimizer
from fedbn_flwr.layerwise import Exchange, SuspendedStep
from fedbn_flwr.layerwise.one_stack import OneStackExchange
from fedbn_flwr.layerwise.steps import Exchanged, Lockstep, Replicas, Weigh
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.server.grids import identify
from fedbn_flwr.simulation.how_trained import APART
from fedbn_flwr.simulation.in_process import Answered, InProcessGrid, RunConfig, one_by_one
from fedbn_flwr.simulation.reply_pool import Job, Replies, ReplyPool
from fedbn_flwr.simulation.sizing import (
    StepMemory,
    clients_that_fit,
    largest_useful_stack,
)
from fedbn_flwr.simulation.stacked.model import Stacks
from fedbn_flwr.simulation.stacked.stacked_layers import CannotStackError
from fedbn_flwr.simulation.stacked.train_together import train_together
from fedbn_flwr.transports import Participant

#: how many clients can wait in the middle of a layer-wise step in the memory that trains one: a
#: waiting client has no reply yet, and most of them have no gradients
WAITING_PER_TRAINING = 2


class StackedGrid(InProcessGrid):
    """Trains clients that share a model and an instruction at once, as a stack of models.

    Results are those of `InProcessGrid` up to rounding, and the same bits whenever the same
    messages come again. Other clients train one after another, and the log says why, once: a
    ClientApp that `client_app` did not make, a model of each client's own, layers that
    `torch.func.vmap` refuses.

    At most `chunk` clients are stacked; by default as many as speed up a step and fit into half of
    the machine's memory, or a quarter of a GPU's. (Free memory does not count, or the bits of a run
    would depend on what else runs.) A stack that an accelerator has no memory for is halved, and so
    are all others from then on.

    With `average_by`, "examples" or "uniform" as the option `weighting` of strategies, the replies
    to the training messages of a push are one: their mean answers the first of the messages, and
    the others have no answer.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: RunConfig | None = None,
        partitions: Sequence[int] | None = None,
        state_dir: Path | None = None,
        *,
        chunk: int = 0,
        average_by: str = "",
    ) -> None:
        super().__init__(client_app, num_nodes, run_config, partitions, state_dir)
        self._average_by = average_by
        #: of the nodes, and so of the memory
        if partitions is None:
            self._share = 1.0
        else:
            self._share = len(partitions) / num_nodes
        self._chunk = chunk
        #: by the id of a model, what a step keeps in memory
        self._memory: dict[int, StepMemory] = {}
        self._logged: set[str] = set()
        #: copies of models, for steps that wait in the middle of a pass
        self._structures = Replicas()
        #: by model, mode and clients, what answers in a stack of all of them
        self._answering: dict[Hashable, OneStackExchange] = {}
        self._stacks = Stacks()

    def _hands_to_clients(self) -> bool:
        hands = super()._hands_to_clients()
        if not hands:
            self._log_once("the ClientApp was not made by `client_app`, or has mods")
        return hands

    def _trainer(self, jobs: Sequence[Job], pool: ReplyPool) -> Iterator[Answered]:
        """Train stacks, then what cannot be stacked, or has failed in a stack.

        A failure is forgotten: whether a later round's stacks fail must not depend on this one, or
        a run that is resumed between them would have other bits. That there was no memory for a
        stack is not: checkpoints keep it.
        """
        trained = set[int]()
        failures = dict[str, str]()
        waiting = self._cut(jobs)
        while waiting:
            stack = waiting.pop(0)
            if len(stack) == 1:
                continue
            try:
                replies = self._train_stack(stack, stack[0].client.model, pool)
            except CannotStackError as reason:
                self._log_once(str(reason))
            except torch.OutOfMemoryError:
                waiting = [
                    part for each in (stack, *waiting) for part in _parts(each, self._how.most)
                ]
            except Exception as error:
                # the first of its kind: others may name other values
                failures.setdefault(type(error).__name__, f"{type(error).__name__}: {error}")
            else:
                trained |= {job.place for job in stack}
                yield stack, replies
        for alone in one_by_one([job for job in jobs if job.place not in trained], pool):
            for kind, failure in failures.items():
                self._log_once(failure, kind, warns=True)
            yield alone

    def _train_stack(
        self,
        stack: Sequence[Job],
        structure: nn.Module,
        pool: ReplyPool,
        exchange: Exchange | None = None,
    ) -> Replies:
        """Train a stack, and return its clients' replies, None where they are in the pool.

        Where the device has no memory for that, let later stacks be at most half as large.
        """
        try:
            return pool.add(train_together(stack, structure, self._stacks.make, exchange))
        except torch.OutOfMemoryError:
            self._how.most = -(-len(stack) // 2)
            self._stacks.clear()
            size = len(stack)
            reason = f"{size} do not fit into the device's memory: from here on {self._how.most}"
            self._log_once(reason, warns=True)
            raise

    def _cut(self, jobs: Sequence[Job], layerwise: bool = False) -> list[list[Job]]:
        """Return stacks of jobs that go together, those with similar numbers of steps, the largest
        numbers first.
        """
        stacks: list[list[Job]] = []
        for group in self._group(jobs):
            size = 1
            if len(group) > 1:
                size = self._size(group[0], layerwise)
            ordered = sorted(group, key=lambda job: -job.steps)
            stacks += _parts(ordered, size)
        return stacks

    def _count_fitting(self, job: Job) -> int:
        """Return how many clients like this one fit into memory, next to those in other processes
        of this machine.
        """
        fitting = clients_that_fit(self._step_memory(job), job.client.device)
        return max(int(fitting * self._share), 1)

    def _log_once(self, reason: str, kind: str = "", warns: bool = False) -> None:
        """Say why clients train one after another; of reasons of a kind, the first."""
        key = kind or reason
        if key not in self._logged:
            self._logged.add(key)
            said = " ".join(reason.split())
            self._how.alone.add(said)
            if warns:
                warn_once(APART + said)
            else:
                log(INFO, "%s", APART + said)

    def _group(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Put jobs together that can be stacked.

        Those that cannot be planned are reported by their messages.
        """
        groups: dict[Hashable, list[Job]] = {}
        for job in jobs:
            with suppress(Exception):
                groups.setdefault(_stack_key(job), []).append(job)
        for key, group in list(groups.items()):
            reason = _why_not_stackable(group[0])
            if reason:
                self._log_once(reason)
                del groups[key]
        if len(groups) > 1 and len(
            {id(group[0].client.structure) for group in groups.values()}
        ) == len(jobs):
            self._log_once("each has a model of its own")
        return list(groups.values())

    def _size(self, job: Job, layerwise: bool) -> int:
        """Return the largest stack of clients like this one that speeds up a step and fits into
        memory.
        """
        most = self._chunk or self._count_useful(job, layerwise)
        return min(most, self._how.most or most)

    def _count_useful(self, job: Job, layerwise: bool) -> int:
        client = job.client
        most = largest_useful_stack(
            client.model, client.device, lambda: self._step_memory(job), layerwise
        )
        if most > 1:
            return min(most, self._count_fitting(job))
        return 1

    def _step_memory(self, job: Job) -> StepMemory:
        model = id(job.client.model)
        if model not in self._memory:
            self._memory[model] = StepMemory.of(job.client, job.instruction)
        return self._memory[model]

    # ---- layer-wise steps ------------------------------------------------------------------------

    def open_step(self, messages: Sequence[Message]) -> "StackedTransport | None":
        """Open the layer-wise step that these messages begin, if all of their nodes can take it in
        stacks.
        """
        if not self._hands_to_clients():
            return None
        for message in messages:
            identify(message)
        stacks = self._cut(self._prepare(dict(enumerate(messages))), layerwise=True)
        if sum(map(len, stacks)) < len(messages):
            return None
        if len(messages) > WAITING_PER_TRAINING * self._count_fitting(stacks[0][0]):
            self._log_once(
                f"a layer-wise step of all {len(messages)} takes more memory than there is"
            )
            return None
        return StackedTransport(self, stacks)

    def _train_in_step(
        self, stack: Sequence[Job], pool: ReplyPool, exchange: Exchange
    ) -> list[Message | None]:
        """Train a stack, on a copy of the model; return its clients' replies as `_train_stack`."""
        model = stack[0].client.model
        structure = self._structures.take(model)
        self._how.sizes.add(len(stack))
        try:
            return list(self._train_stack(stack, structure, pool, exchange).values())
        finally:
            self._structures.give_back(model, structure)

    def _train_at_once(
        self, stack: Sequence[Job], pool: ReplyPool, weights: Sequence[float]
    ) -> tuple[list[Message | None], list[Exchanged]]:
        """Train a stack of all clients of a layer-wise step, which need not be asked.

        Return their replies, as above, and what exchanges would have carried.
        """
        client = stack[0].client
        key = id(client.model), stack[0].instruction.layerwise, len(stack)
        if key not in self._answering:
            self._answering[key] = OneStackExchange(len(stack), client.device)
        exchange = self._answering[key]
        exchange.begin(weights)
        replies = self._train_stack(stack, client.model, pool, exchange)
        exchange.end()
        self._how.sizes.add(len(stack))
        sizes = [Exchanged(*size) for size in exchange.sizes.values()]
        return list(replies.values()), sizes


class StackedTransport(Lockstep[Message | None]):
    """A `NodesTransport` of stacked nodes in this process: all clients of a stack ask at once, and
    nothing is packed.

    A stack trains in streams of its clients' own.
    """

    def __init__(self, grid: StackedGrid, stacks: Sequence[Sequence[Job]]) -> None:
        jobs = [job for stack in stacks for job in stack]
        everyone = [
            Participant(job.client.partition_id, job.node, len(job.client.indices)) for job in jobs
        ]
        order = sorted(range(len(jobs)), key=everyone.__getitem__)
        pool = ReplyPool(grid._average_by)
        # the seed is not used: stacked clients draw from their own streams
        steps = [
            SuspendedStep(partial(grid._train_in_step, stack, pool), seed=0) for stack in stacks
        ]
        super().__init__(steps, order)
        self._stacks_of_jobs = stacks
        self.participants = [everyone[position] for position in order]
        self._jobs = [jobs[position] for position in order]
        self._pool = pool
        self._grid = grid

    def take_at_once(self, weigh: Weigh) -> Sequence[Exchanged] | None:
        """Take the step of a single stack in this thread."""
        if len(self._stacks_of_jobs) > 1:
            return None
        stack = self._stacks_of_jobs[0]
        nodes = [job.node for job in self._jobs]
        by_node = dict(zip(nodes, weigh(), strict=True))
        weights = [by_node[job.node] for job in stack]
        replies, exchanges = self._grid._train_at_once(stack, self._pool, weights)
        self._end(replies)
        return exchanges

    def replies(self) -> list[Message]:  # type: ignore[override]
        """Let nodes keep what they remember; return their replies, or the mean."""
        for job in self._jobs:
            self._grid._keep(job.node, job.context)
        replies = [*filter(None, super().replies()), *self._pool.mean().values()]
        for reply in replies:
            identify(reply)
        return replies


def _parts(jobs: list[Job], size: int) -> list[list[Job]]:
    """Return stacks of at most this size."""
    return [jobs[start : start + size] for start in range(0, len(jobs), size)]


def _stack_key(job: Job) -> Hashable:
    """Return what jobs must have in common to be stacked; raise if a job cannot be planned."""
    client = job.client
    instruction = job.instruction
    _ = job.steps
    remembered = tuple(sorted(name for name, _ in client.memory.kept("")))
    groups = tuple(sorted(job.received))
    # the first mini-batches of a layer-wise step meet at every layer
    apart = instruction.layerwise in ("none", *wire.CARRIED_MODES)
    first_batch = apart or client.batch_sizes(instruction)[0]
    return (
        type(client),
        client.make_optimizer is make_optimizer,
        id(client.structure),
        client.loss_function,
        client.device,
        instruction,
        groups,
        remembered,
        first_batch,
    )


def _why_not_stackable(job: Job) -> str:
    """Say why clients like this job's cannot be stacked, whatever their model is; empty if they
    can.
    """
    client = job.client
    instruction = job.instruction
    if type(client) is not BNClient:
        return f"{type(client).__name__} may train in a way of its own"
    try:
        _ = client.model
    except Exception as error:  # of the device that it is moved to
        return f"{type(error).__name__}: {error}"
    if client.make_optimizer is not make_optimizer:
        return "its optimizer is its own"
    for rule in rules_for(instruction):
        if not rule.stacks:
            return f"{type(rule).__name__} does not work on stacked models"
    if instruction.optimizer != "sgd" and instruction.momentum_state != "none":
        return (
            f"the state of {instruction.optimizer} counts the steps of all clients of a stack alike"
        )
    return ""
