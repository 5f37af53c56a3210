"""The in-process `Grid` whose nodes train at the same time, where they can."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO
from pathlib import Path

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.client.layerwise_step import Replicas
from fedbn_flwr.client.rules import rules_for
from fedbn_flwr.clientapp import BNClientApp, pack
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.simulation.prepared import Job, StagedGrid
from fedbn_flwr.simulation.sequential import Config, identify
from fedbn_flwr.simulation.spill import SpillBuffer
from fedbn_flwr.simulation.stacked.layerwise_step import StackedLayerwiseStep, SuspendedStack
from fedbn_flwr.simulation.stacked.memory_budget import clients_that_fit, worth_stacking
from fedbn_flwr.simulation.stacked.timing import (
    STACKED,
    STACKED_LAST,
    WAYS,
    WORTH_COMPILING,
    Choice,
    Kept,
    describe,
    measure,
)
from fedbn_flwr.simulation.stacked.training import train_together
from fedbn_flwr.simulation.stacked.variants import Variants, has_images
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.layerwise_grid import Participant

#: how many clients wait in the middle of a step where there is memory for one that trains: they have no reply yet, and
#: most of them no gradients
IN_THE_MIDDLE = 2


def _attempt(job: Job) -> Hashable:
    """What jobs have in common that can be done together, or cannot."""
    return id(job.client.model), tuple(job.instruction.binding_keys()), job.instruction.augmentation


def _steps(job: Job) -> int:
    """How many of them a job has."""
    return job.client.count_steps(job.instruction)


def _kind(job: Job) -> Hashable:
    """What jobs must have in common to be done together."""
    client, instruction = job.client, job.instruction
    _steps(job)  # what cannot be planned is refused here
    remembered = tuple(sorted(name for name, _ in client.memory.kept("")))
    groups = tuple(sorted(job.received))
    # the first batches of a layer-wise step meet at every layer
    together = instruction.layerwise == "none" or client.first_batch_size(instruction)
    return id(client.model), client.loss_function, client.device, instruction, groups, remembered, together


class CohortGrid(StagedGrid):
    """Answers the training messages of a push together, as far as clients share a model and an instruction.

    Results are those of `InProcessGrid` up to rounding. `way` is one of `choice.WAYS`, or `auto`: the fastest for the
    model on this machine, which is measured before the first round and kept for the next run. Whatever the way, clients
    train one after another where they must, and the log says why, once: a ClientApp that `client_app` did not make, a
    model of each one's own, layers that `torch.func.vmap` refuses.

    At most `chunk` clients are stacked, by default as many as are worth it and fit into memory. `expected_steps`, of
    all clients in all rounds, tells whether compiling a model is worth its time; without it, it is not tried.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Config | None = None,
        partitions: Sequence[int] | None = None,
        state_dir: Path | None = None,
        *,
        way: str = "auto",
        chunk: int = 0,
        expected_steps: int = 0,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(client_app, num_nodes, run_config, partitions, state_dir)
        if way not in ("auto", *WAYS):
            raise ValueError(f"unknown way {way!r}; known: auto, {', '.join(WAYS)}")
        self.way, self._given_chunk, self._expected_steps = way, chunk, expected_steps
        self._num_nodes = num_nodes
        self._kept = kept or Kept()
        #: what was chosen for each model and size of batch
        self.choices: dict[Hashable, Choice] = {}
        #: for how many clients with a model there is memory
        self._room: dict[int, int] = {}
        self._apart: set[Hashable] = set()
        self._variants = Variants()
        #: models of steps that wait for an answer in the middle of a pass
        self._structures = Replicas()

    def open_step(self, messages: Sequence[Message]) -> StackedLayerwiseStep | None:
        """The layer-wise step that these messages begin, if all of their nodes can take it together."""
        if self.way not in ("auto", STACKED, STACKED_LAST) or not self._knows_clients():
            return None
        for message in messages:
            identify(message)
        jobs = [job for alike in self._alike(dict(enumerate(messages))) for job in self._in_chunks(alike)]
        if sum(map(len, jobs)) < len(messages) or any(_attempt(chunk[0]) in self._apart for chunk in jobs):
            return None
        if len(messages) > IN_THE_MIDDLE * self._fitting(jobs[0]):
            self._say(f"a layer-wise step of all {len(messages)} takes more memory than there is")
            return None
        steps = [SuspendedStack([job.place for job in chunk], self._step_of(chunk)) for chunk in jobs]
        every = {job.place: job for chunk in jobs for job in chunk}
        participants = {
            place: Participant(job.client.partition_id, job.node, len(job.client.indices))
            for place, job in every.items()
        }
        return StackedLayerwiseStep(steps, participants, lambda replies: self._close(every, replies))

    def _step_of(self, jobs: Sequence[Job]) -> Callable[[Exchange], list[Reply]]:
        channels_last = self._way(jobs) == STACKED_LAST

        def train(exchange: Exchange) -> list[Reply]:
            client, instruction = jobs[0].client, jobs[0].instruction
            structure = self._structures.take(client.model)
            clients, received = [job.client for job in jobs], [job.received for job in jobs]
            try:
                return train_together(clients, structure, received, instruction, exchange, channels_last)
            except Exception:
                self._apart.add(_attempt(jobs[0]))
                raise
            finally:
                self._structures.give_back(client.model, structure)

        return train

    def _close(self, jobs: Mapping[int, Job], replies: Mapping[int, Reply]) -> list[Message]:
        """The replies to the messages, in their order."""
        self._spill = SpillBuffer()
        messages = [self._spill.store(pack(replies[place], jobs[place].message, copy=False)) for place in sorted(jobs)]
        for job in jobs.values():
            self._keep(job.node, job.context)
        for message in messages:
            identify(message)
        return messages

    @property
    def choice(self) -> dict[str, str | int | float]:
        """How clients train, for whoever reports it."""
        ways = {found.way for found in self.choices.values()} if self.way == "auto" else {self.way}
        compiling = sum(found.compile_seconds for found in self.choices.values())
        threads = torch.get_num_threads()
        return {"how": ", ".join(sorted(ways)), "workers": 1, "threads": threads, "compile-seconds": compiling}

    def _train(self, messages: dict[int, Message]) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        for jobs in self._alike(messages):
            answers |= self._train_alike(jobs, self._way(jobs))
        return answers

    def _train_alike(self, jobs: list[Job], way: str) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        if way in (STACKED, STACKED_LAST):
            for chunk in self._in_chunks(jobs):
                answers |= self._together(chunk, way == STACKED_LAST)
            return answers
        for job in jobs:
            self._variants.prepare(job.client, way)
        return self._in_turn(jobs)

    def _way(self, jobs: Sequence[Job]) -> str:
        """How these are done: as was asked for, or as is the fastest."""
        if self.way != "auto":
            return self.way
        if len(jobs) < 2:
            return "plain"
        client, instruction = jobs[0].client, jobs[0].instruction
        place = id(client.model), instruction.batch_size, instruction.precision, min(len(jobs), self._chunk(jobs))
        if place not in self.choices:
            self.choices[place] = self._choose(jobs, describe(client.model, client.device, *place[1:]))
        return self.choices[place].way

    def _choose(self, jobs: Sequence[Job], key: str) -> Choice:
        if known := self._kept.recall(key):
            return known
        stack, few = jobs[: self._chunk(jobs)], jobs[:2]
        ways = {"plain": few, "channels-last": few, STACKED: stack, STACKED_LAST: stack}
        if not has_images(jobs[0].client.model):
            del ways["channels-last"], ways[STACKED_LAST]
        found = measure({way: partial(self._rehearse, some, way) for way, some in ways.items()})
        if min(found.seconds.values(), default=0.0) * self._expected_steps > WORTH_COMPILING:
            found = found.joined(measure({"compiled": partial(self._rehearse, few, "compiled")}))
        log(INFO, "Clients of this model train %s", found)
        self._kept.keep(key, found)
        return found

    def _rehearse(self, jobs: Sequence[Job], way: str) -> int:
        """Two steps of some clients, of which nothing remains; returns how many steps that was."""
        assert isinstance(self._client_app, BNClientApp)
        client_fn, nodes = self._client_app.client_fn, [job.node for job in jobs]
        short = replace(jobs[0].instruction, local_steps=2, local_epochs=1, layerwise="none")
        clients = [client_fn(self._lend(node)) for node in nodes]
        if way in (STACKED, STACKED_LAST):
            received = [job.received for job in jobs]
            train_together(clients, clients[0].model, received, short, channels_last=way == STACKED_LAST)
        else:
            for client, job in zip(clients, jobs, strict=True):
                self._variants.prepare(client, way)
                client.train(job.received, short)
        return 2 * len(jobs)

    def _in_chunks(self, jobs: list[Job]) -> list[list[Job]]:
        """With like numbers of steps side by side, the largest first."""
        if len(jobs) == 1:
            return [jobs]
        size = self._chunk(jobs)
        ordered = sorted(jobs, key=lambda job: -_steps(job))
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def _chunk(self, jobs: Sequence[Job]) -> int:
        """How many clients are stacked."""
        if self._given_chunk:
            return self._given_chunk
        return min(worth_stacking(jobs[0].client.device), self._fitting(jobs))

    def _fitting(self, jobs: Sequence[Job]) -> int:
        """How many clients there is memory for."""
        client, instruction = jobs[0].client, jobs[0].instruction
        if id(client.model) not in self._room:
            # the other nodes may be in other processes of this machine
            share = len(self._contexts) / self._num_nodes
            self._room[id(client.model)] = max(int(clients_that_fit(client, instruction) * share), 1)
        return self._room[id(client.model)]

    def _alike(self, messages: dict[int, Message]) -> list[list[Job]]:
        """The jobs that can be done together."""
        groups: dict[Hashable, list[Job]] = {}
        for job in self._jobs(messages):
            try:
                kind = _kind(job)
            except Exception:  # it is reported when the message is answered
                continue
            if reason := _stays_apart(job.client, job.instruction):
                self._say(reason)
            else:
                groups.setdefault(kind, []).append(job)
        if len(groups) > 1 and len({id(jobs[0].client.model) for jobs in groups.values()}) == len(messages):
            self._say("each has a model of its own")
        return list(groups.values())

    def _knows_clients(self) -> bool:
        known = super()._knows_clients()
        if not known:
            self._say("the ClientApp was not made by `client_app`")
        return known

    def _together(self, jobs: Sequence[Job], channels_last: bool) -> dict[int, Message]:
        """The answers; none if the clients must train one after another."""
        client, instruction = jobs[0].client, jobs[0].instruction
        attempt = _attempt(jobs[0])
        if len(jobs) < 2 or attempt in self._apart:
            return {}
        try:
            clients, received = [job.client for job in jobs], [job.received for job in jobs]
            replies = train_together(clients, client.model, received, instruction, channels_last=channels_last)
        except Exception as error:
            self._apart.add(attempt)
            self._say(f"{type(error).__name__}: {error}")
            return {}
        packed = (pack(reply, job.message, copy=False) for job, reply in zip(jobs, replies, strict=True))
        answers = {job.place: self._spill.store(message) for job, message in zip(jobs, packed, strict=True)}
        for job in jobs:
            self._keep(job.node, job.context)
        return answers

    def _failed(self, job: Job, error: Exception) -> None:
        if job.client.forward is not None:
            self._say(f"{type(error).__name__}: {error}")

    def _say(self, reason: str) -> None:
        if reason not in self._apart:
            self._apart.add(reason)
            log(INFO, "Clients train one after another: %s", " ".join(reason.split()))


def _stays_apart(client: BNClient, instruction: Instruction) -> str:
    """Why a client cannot be stacked whatever its model is; empty if it can."""
    if type(client) is not BNClient:
        return f"{type(client).__name__} may train in a way of its own"
    for rule in rules_for(instruction):
        if not rule.stacks:
            return f"{type(rule).__name__} does not work on stacked models"
    if instruction.optimizer != "sgd" and instruction.momentum_state != "none":
        return f"the state of {instruction.optimizer} counts the steps of all clients of a stack alike"
    return ""
