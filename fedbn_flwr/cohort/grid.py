"""The in-process `Grid` whose nodes train at the same time, where they can."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import BNClientApp, pack, unpack
from fedbn_flwr.cohort.learning import train_together
from fedbn_flwr.inprocess import Config, InProcessGrid
from fedbn_flwr.rules import rules_for
from fedbn_flwr.state import State
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
        return id(client.model), client.loss_function, client.device, self.instruction, groups, remembered


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

    def _answer_all(self, messages: Sequence[Message]) -> list[Message]:
        answers: dict[int, Message] = {}
        training = [place for place, message in enumerate(messages) if message.metadata.message_type == MessageType.TRAIN]
        if isinstance(self._client_app, BNClientApp) and len(training) > 1:
            at_once = self._chunk * _SORTED_CHUNKS
            for start in range(0, len(training), at_once):
                answers |= self._train({place: messages[place] for place in training[start : start + at_once]})
        return [answers[place] if place in answers else self._answer(message) for place, message in enumerate(messages)]

    def _train(self, messages: dict[int, Message]) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        for jobs in self._alike(messages):
            jobs.sort(key=lambda job: -job.client.count_steps(job.instruction))
            for start in range(0, len(jobs), self._chunk):
                answers |= self._together(jobs[start : start + self._chunk])
        return answers

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
            except Exception:  # noqa: S112  # alone, the client will fail in the same way, and be reported
                continue
            if not (reason := _stays_apart(instruction)):
                groups.setdefault(job.kind(), []).append(job)
            else:
                self._say(reason)
        return list(groups.values())

    def _together(self, jobs: Sequence[Job]) -> dict[int, Message]:
        """The answers; none if the clients must train one after another."""
        client, instruction = jobs[0].client, jobs[0].instruction
        attempt = id(client.model), tuple(instruction.binding_keys()), instruction.augmentation
        if len(jobs) < 2 or attempt in self._apart:
            return {}
        try:
            replies = train_together([job.client for job in jobs], client.model, [job.received for job in jobs], instruction)
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
