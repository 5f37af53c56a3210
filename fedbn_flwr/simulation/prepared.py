"""The in-process `Grid` whose clients are prepared, trained and answered stage by stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.app import Context, Message, MessageType

from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp import BNClientApp, pack, unpack
from fedbn_flwr.simulation.sequential import InProcessGrid
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState
from fedbn_flwr.wire import Instruction

T = TypeVar("T")

#: clients whose work is prepared together; of those with like numbers of steps a cohort makes its chunks
TOGETHER = 100
#: bytes of replies that wait until others are trained
MOST_UNPACKED = 2**26


@dataclass(frozen=True)
class Job:
    """One training message's work."""

    place: int
    message: Message
    context: Context
    client: BNClient
    received: Mapping[str, State]
    instruction: Instruction

    @property
    def node(self) -> int:
        """Whose work."""
        return self.message.metadata.dst_node_id


class StagedGrid(InProcessGrid):
    """Trains the clients of a push one after another, without what `InProcessGrid` repeats for each message.

    All are prepared, then all train, then their replies are packed: what is done several times in a row stays in the
    processor's caches. The ClientApp must be one of `client_app`, or messages are answered one by one; its handler is
    passed by, and its `client_fn` called for many nodes before the first trains. Results have the bits of
    `InProcessGrid`. A client that fails is asked again, alone, and reported if it fails then.
    """

    def _answer_all(self, messages: Sequence[Message]) -> list[Message]:
        """The replies, in the order of the messages."""
        answers: dict[int, Message] = {}
        training = [
            place for place, message in enumerate(messages) if message.metadata.message_type == MessageType.TRAIN
        ]
        if len(training) > 1 and self._knows_clients():
            for places in in_portions(training):
                answers |= self._train({place: messages[place] for place in places})
        return [answers[place] if place in answers else self._answer(message) for place, message in enumerate(messages)]

    def _knows_clients(self) -> bool:
        """Whether clients can be had, and not only what they answer."""
        return isinstance(self._client_app, BNClientApp)

    def _train(self, messages: dict[int, Message]) -> dict[int, Message]:
        """The answers by the messages' places, as far as nothing fails: alone, a client that fails is reported."""
        return self._in_turn(self._jobs(messages))

    def _jobs(self, messages: dict[int, Message]) -> list[Job]:
        """The messages' work, where it can be told."""
        assert isinstance(self._client_app, BNClientApp)
        jobs, known, nodes = [], dict[int, Any](), set[int]()
        for place, message in messages.items():
            if (node := message.metadata.dst_node_id) in nodes:
                continue  # a node's second message finds what the first has left
            nodes.add(node)
            try:
                context = self._lend(node)
                client = self._client_app.client_fn(context)
                received = unpack(message, known if _is_careful(client) else None)
                jobs.append(Job(place, message, context, client, *received))
            except Exception:  # it is reported when the message is answered
                continue
        return jobs

    def _in_turn(self, jobs: Sequence[Job]) -> dict[int, Message]:
        """The answers of those that do not fail."""
        trained: list[tuple[Job, Reply]] = []
        answers: dict[int, Message] = {}
        for job in jobs:
            try:
                reply = job.client.train(job.received, job.instruction)
            except Exception as error:
                self._failed(job, error)
                continue
            trained.append((job, reply))
            # another client's tensors may be those of its model, which the next one changes
            if not _is_careful(job.client) or _bytes(reply) * len(trained) > MOST_UNPACKED:
                answers |= self._all_packed(trained)
                trained.clear()
        return answers | self._all_packed(trained)

    def _all_packed(self, trained: Sequence[tuple[Job, Reply]]) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        for job, reply in trained:
            try:
                answers[job.place] = self._packed(job, reply)
            except Exception as error:
                self._failed(job, error)
        return answers

    def _packed(self, job: Job, reply: Reply) -> Message:
        """The answer; only now what the node has stored counts."""
        message = self._spill.store(pack(reply, job.message, copy=not _is_careful(job.client)))
        self._keep(job.node, job.context)
        return message

    def _failed(self, job: Job, error: Exception) -> None:
        """Called for a job that will be tried again, alone."""


def in_portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Of at most so many as are prepared together."""
    return (items[start : start + TOGETHER] for start in range(0, len(items), TOGETHER))


def _bytes(reply: Reply) -> int:
    """Of its tensors; those of a flat state are counted without being made."""
    states = [state.buffers if isinstance(state, FlatState) else state for state in reply.records.values()]
    return sum(values.nbytes for state in states for values in state.values())


def _is_careful(client: BNClient) -> bool:
    """Whether it is known to change nothing that it got or gave: then nothing needs to be copied."""
    return type(client) is BNClient
