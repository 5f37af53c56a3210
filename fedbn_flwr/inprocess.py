"""Flower's `Grid` without Ray or a network: the ServerApp's own process runs one node after another."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp import BNClientApp, pack, unpack
from fedbn_flwr.contexts import FIRST_NODE_ID as FIRST_NODE_ID
from fedbn_flwr.contexts import Contexts
from fedbn_flwr.grids import LocalGrid
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction

Config = Mapping[str, Any]

#: clients looked at together
_LOOKED_AT = 100


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


class InProcessGrid(LocalGrid):
    """Runs the same ServerApp and ClientApp as Flower's engines do.

    Each node has a `Context` that lives as long as the grid. A message is answered when it is pushed; what the
    ClientApp raises becomes an error reply, and what it had stored by then is lost, as in Flower.

    With `partitions` only these nodes of all are here. With `state_dir` what nodes store is kept in this folder, a
    file for each, and not in memory.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Config | None = None,
        partitions: Sequence[int] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        super().__init__()
        self._client_app = client_app
        here = range(num_nodes) if partitions is None else partitions
        self._contexts: MutableMapping[int, Context] = Contexts(
            self._run.run_id, here, num_nodes, dict(run_config or {}), state_dir
        )

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, always connected."""
        return list(self._contexts)

    def context(self, node: int) -> Context:
        """A node's context, to look into."""
        return self._contexts[node]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages and keep the replies."""
        messages = list(messages)
        ids = [identify(message) for message in messages]
        for message_id, reply in zip(ids, self._answer_all(messages), strict=True):
            identify(reply)
            self._replies[message_id] = reply
        return ids

    def _answer_all(self, messages: Sequence[Message]) -> list[Message]:
        """The replies, in the order of the messages."""
        answers: dict[int, Message] = {}
        training = [
            place for place, message in enumerate(messages) if message.metadata.message_type == MessageType.TRAIN
        ]
        if len(training) > 1 and self._knows_clients():
            for start in range(0, len(training), _LOOKED_AT):
                answers |= self._train({place: messages[place] for place in training[start : start + _LOOKED_AT]})
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

    def _in_turn(self, jobs: Sequence[Job], keep: bool = True) -> dict[int, Message]:
        """The answers of those that do not fail. One thing at a time for all of them: processors like it better."""
        answers: dict[int, Message] = {}
        replies: list[tuple[Job, Reply]] = []
        for job in jobs:
            try:
                reply = job.client.train(job.received, job.instruction)
            except Exception as error:
                self._failed(job, error)
                continue
            if keep:
                self._keep(job.node, job.context)
            if _is_careful(job.client):
                replies.append((job, reply))
            else:
                answers[job.place] = pack(reply, job.message)
        return answers | {job.place: pack(reply, job.message, own=True) for job, reply in replies}

    def _failed(self, job: Job, error: Exception) -> None:
        """Called for a job that will be tried again, alone."""

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            context = self._lend(node)
            reply = self._client_app(message, context)
        except Exception as error:
            log(WARNING, "The ClientApp of node %d raised", node, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        self._keep(node, context)
        return reply

    def _lend(self, node: int) -> Context:
        """A node's context, changes to which are lost unless they are kept."""
        known = self._contexts[node]
        return replace(known, state=RecordDict(dict(known.state)))

    def _keep(self, node: int, context: Context) -> None:
        self._contexts[node] = context


def _is_careful(client: BNClient) -> bool:
    """Whether it is known to change nothing that it got or gave: then nothing needs to be copied."""
    return type(client) is BNClient


def identify(message: Message) -> str:
    """Give a message the id that it otherwise gets on its way."""
    message.metadata.__dict__["_message_id"] = str(uuid4())
    return message.metadata.message_id


def run_in_process(
    server_main: Callable[[Grid, Context], None],
    client_app: ClientApp,
    num_nodes: int,
    run_config: Config,
    make_grid: Callable[[ClientApp, int, Config], Grid] | None = None,
) -> None:
    """Run a server's main function against in-process nodes, or those of another grid (`cohort.CohortGrid`)."""
    grid = (make_grid or InProcessGrid)(client_app, num_nodes, run_config)
    context = Context(grid.run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(run_config))
    server_main(grid, context)
