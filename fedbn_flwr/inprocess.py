"""Flower's `Grid` without Ray or a network: the ServerApp's own process runs one node after another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

#: Flower reserves small ids for its own parts
FIRST_NODE_ID = 1000

Config = Mapping[str, Any]


class InProcessGrid(Grid):
    """Runs the same ServerApp and ClientApp as Flower's engines do.

    Each node has a `Context` that lives as long as the grid. A message is answered when it is pushed; what the
    ClientApp raises becomes an error reply, and what it had stored by then is lost, as in Flower. With `partitions`, it
    has only their nodes, of `num_nodes` in all.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Config | None = None,
        partitions: Sequence[int] | None = None,
    ) -> None:
        self._client_app = client_app
        self._run = Run.create_empty(run_id=1)
        self._contexts = {
            FIRST_NODE_ID + index: Context(
                run_id=self._run.run_id,
                node_id=FIRST_NODE_ID + index,
                node_config={"partition-id": index, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for index in (range(num_nodes) if partitions is None else partitions)
        }
        self._replies: dict[str, Message] = {}
        # Flower reads these when a message is created
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
            self._run.run_id,
            SUPERLINK_NODE_ID,
            0,
        )

    def set_run(self, run: Run) -> None:
        """Take the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as Flower's older interface does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, always connected."""
        return list(self._contexts)

    def context(self, node: int) -> Context:
        """A node's context, to look into."""
        return self._contexts[node]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages and keep the replies."""
        ids = []
        for message in messages:
            ids.append(_identify(message))
            self._replies[ids[-1]] = self._answer(message)
            _identify(self._replies[ids[-1]])
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand the replies over, once."""
        return [self._replies.pop(item) for item in message_ids if item in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver and collect."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            known = self._contexts[node]
            context = replace(known, state=RecordDict(dict(known.state)))
            reply = self._client_app(message, context)
        except Exception as error:
            log(WARNING, "The ClientApp of node %d raised", node, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        self._contexts[node] = context
        return reply


def _identify(message: Message) -> str:
    """Give a message the id that it otherwise gets on its way."""
    message.metadata.__dict__["_message_id"] = str(uuid4())
    return message.metadata.message_id


def run_in_process(
    server_main: Callable[[Grid, Context], None], client_app: ClientApp, num_nodes: int, run_config: Config
) -> None:
    """Run a server's main function against in-process nodes."""
    grid = InProcessGrid(client_app, num_nodes, run_config)
    context = Context(grid.run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(run_config))
    server_main(grid, context)
