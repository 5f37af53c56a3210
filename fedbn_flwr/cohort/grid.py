"""The in-process `Grid` whose nodes train at the same time, where they can."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr.client import BNClient, Reply, layerwise_mode
from fedbn_flwr.clientapp import BNClientApp, pack, unpack
from fedbn_flwr.cohort.learning import train_together
from fedbn_flwr.cohort.steps import CohortStep, Speaker, StackedStep
from fedbn_flwr.inprocess import Config, InProcessGrid, identify
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.rules import rules_for
from fedbn_flwr.state import State
from fedbn_flwr.suspended import Foreseeing, Replicas
from fedbn_flwr.wire import Instruction

#: clients looked at together, in chunks: those with like numbers of steps are then put into one chunk
_SORTED_CHUNKS = 5


@dataclass(frozen=True)
class Job:
    """One message's work."""

    place: int
    message: Message
    context: Context
    client: BNClient
    received: dict[str, State]
    instruction: Instruction

    def kind(self) -> Hashable:
        """What jobs must have in common to be done together."""
        client = self.client
        remembered = tuple(sorted(name for name, _ in client.memory.kept("")))
        groups = tuple(sorted(self.received))
        # the first batches of a layer-wise step meet at every layer
        together = self.instruction.layerwise == "none" or client.first_batch_size(self.instruction)
        return id(client.model), client.loss_function, client.device, self.instruction, groups, remembered, together


class CohortGrid(InProcessGrid):
    """Answers the training messages of a push together, as far as clients share a model and an instruction.

    Results are those of `InProcessGrid` up to rounding. Clients train one after another where they must, and the log
    says why, once: a ClientApp that `client_app` did not make, a model of each one's own, layers that
    `torch.func.vmap` refuses.
    """

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: Config | None = None, chunk: int = 20
    ) -> None:
        super().__init__(client_app, num_nodes, run_config)
        self._chunk = chunk
        self._apart: set[Hashable] = set()
        #: models of steps that wait for an answer in the middle of a pass
        self._structures = Replicas()

    def _answer_all(self, messages: Sequence[Message]) -> list[Message]:
        answers: dict[int, Message] = {}
        training = [
            place for place, message in enumerate(messages) if message.metadata.message_type == MessageType.TRAIN
        ]
        if isinstance(self._client_app, BNClientApp) and len(training) > 1:
            at_once = self._chunk * _SORTED_CHUNKS
            for start in range(0, len(training), at_once):
                answers |= self._train({place: messages[place] for place in training[start : start + at_once]})
        return [answers[place] if place in answers else self._answer(message) for place, message in enumerate(messages)]

    def open_step(self, messages: Sequence[Message]) -> CohortStep | None:
        """The layer-wise step that these messages begin, if all of their nodes can take it together."""
        if not isinstance(self._client_app, BNClientApp):
            return None
        for message in messages:
            identify(message)
        jobs = [job for alike in self._alike(dict(enumerate(messages))) for job in self._in_chunks(alike)]
        if sum(map(len, jobs)) < len(messages):
            return None
        steps = [StackedStep([job.place for job in chunk], self._step_of(chunk)) for chunk in jobs]
        every = {job.place: job for chunk in jobs for job in chunk}
        clients = [every[place].client for place in range(len(messages))]
        obeyed = jobs[0][0].instruction.binding_keys()
        speakers = [Speaker(client.partition_id, len(client.indices), obeyed) for client in clients]
        return CohortStep(steps, speakers, lambda replies: self._close(every, replies))

    def _step_of(self, jobs: Sequence[Job]) -> Callable[[Exchange], list[Reply]]:
        def train(exchange: Exchange) -> list[Reply]:
            client, instruction = jobs[0].client, jobs[0].instruction
            structure = self._structures.take(client.model)
            foreseeing = Foreseeing(structure, layerwise_mode(instruction), exchange)
            received = [job.received for job in jobs]
            try:
                return train_together([job.client for job in jobs], structure, received, instruction, foreseeing)
            finally:
                foreseeing.close()
                self._structures.give_back(client.model, structure)

        return train

    def _close(self, jobs: Mapping[int, Job], replies: Mapping[int, Reply]) -> list[Message]:
        """The replies to the messages, in their order."""
        for job in jobs.values():
            self._keep(job.context)
        messages = [pack(replies[place], jobs[place].message) for place in sorted(jobs)]
        for message in messages:
            identify(message)
        return messages

    def _train(self, messages: dict[int, Message]) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        for alike in self._alike(messages):
            for jobs in self._in_chunks(alike):
                answers |= self._together(jobs)
        return answers

    def _in_chunks(self, jobs: list[Job]) -> list[list[Job]]:
        """With like numbers of steps side by side, the largest first."""
        ordered = sorted(jobs, key=lambda job: -job.client.count_steps(job.instruction))
        return [ordered[start : start + self._chunk] for start in range(0, len(ordered), self._chunk)]

    def _alike(self, messages: dict[int, Message]) -> list[list[Job]]:
        """The jobs that can be done together."""
        assert isinstance(self._client_app, BNClientApp)
        groups: dict[Hashable, list[Job]] = {}
        known: dict[int, Any] = {}
        for place, message in messages.items():
            try:
                context = self._lend(message.metadata.dst_node_id)
                received, instruction = unpack(message, known)
                job = Job(place, message, context, self._client_app.client_fn(context), received, instruction)
            except Exception:  # alone, the client will fail in the same way, and be reported
                continue
            if reason := _stays_apart(instruction):
                self._say(reason)
            else:
                groups.setdefault(job.kind(), []).append(job)
        return list(groups.values())

    def _together(self, jobs: Sequence[Job]) -> dict[int, Message]:
        """The answers; none if the clients must train one after another."""
        client, instruction = jobs[0].client, jobs[0].instruction
        attempt = id(client.model), tuple(instruction.binding_keys()), instruction.augmentation
        if len(jobs) < 2 or attempt in self._apart:
            return {}
        try:
            replies = train_together(
                [job.client for job in jobs], client.model, [job.received for job in jobs], instruction
            )
        except Exception as error:
            self._apart.add(attempt)
            self._say(f"{type(error).__name__}: {error}")
            return {}
        for job in jobs:
            self._keep(job.context)
        return {job.place: pack(reply, job.message) for job, reply in zip(jobs, replies, strict=True)}

    def _say(self, reason: str) -> None:
        if reason not in self._apart:
            self._apart.add(reason)
            log(INFO, "Clients train one after another: %s", " ".join(reason.split()))


def _stays_apart(instruction: Instruction) -> str:
    """Why these clients cannot be stacked whatever their model is; empty if they can."""
    for rule in rules_for(instruction):
        if not rule.stacks:
            return f"{type(rule).__name__} does not work on stacked models"
    if instruction.optimizer != "sgd" and instruction.momentum_state != "none":
        return f"the state of {instruction.optimizer} counts the steps of all clients of a stack alike"
    return ""
