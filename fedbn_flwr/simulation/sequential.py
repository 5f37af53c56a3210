"""Flower's `Grid` without Ray or a network: the ServerApp's own process runs one node after another."""

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.clientapp.bn_client_app import BNClientApp
from fedbn_flwr.simulation.grid import LocalGrid
from fedbn_flwr.simulation.node_contexts import FIRST_NODE_ID as FIRST_NODE_ID
from fedbn_flwr.simulation.node_contexts import Contexts
from fedbn_flwr.simulation.spill import SpillBuffer
from fedbn_flwr.state.records import lend_record

Config = Mapping[str, Any]


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
        """Return all nodes: they are always connected."""
        return list(self._contexts)

    def context(self, node: int) -> Context:
        """A node's context, to look into."""
        return self._contexts[node]

    def save_states(self, folder: Path) -> None:
        """Write what the nodes here remember into a folder."""
        cast(Contexts, self._contexts).save(folder)

    def restore_states(self, folder: Path) -> None:
        """Let the nodes here remember what is in a folder."""
        cast(Contexts, self._contexts).restore(folder)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages and keep the replies."""
        messages = list(messages)
        self._spill = SpillBuffer()
        ids = [identify(message) for message in messages]
        for message_id, reply in zip(ids, self._answer_all(messages), strict=True):
            identify(reply)
            self._replies[message_id] = reply
        return ids

    def _answer_all(self, messages: Sequence[Message]) -> list[Message]:
        """The replies, in the order of the messages."""
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            context = self._lend(node)
            reply = self._spill.store(self._client_app(self._deliver(message), context))
        except Exception as error:
            log(WARNING, "The ClientApp of node %d raised", node, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        self._keep(node, context)
        return reply

    def _deliver(self, message: Message) -> Message:
        """Return the message as a node gets it, to change as it likes: messages of a push share their records."""
        return message if self._hands_to_clients() else _copy(message)

    def _hands_to_clients(self) -> bool:
        """Whether nothing but clients of this project sees messages; they leave them as they are."""
        return isinstance(self._client_app, BNClientApp) and self._client_app.is_plain

    def _lend(self, node: int) -> Context:
        """A node's context, changes to which are lost unless they are kept."""
        known = self._contexts[node]
        return replace(known, state=RecordDict(dict(known.state)))

    def _keep(self, node: int, context: Context) -> None:
        self._contexts[node] = context


def _copy(message: Message) -> Message:
    delivered = copy.copy(message)
    # a Message has no setter for what it is made of
    delivered.__dict__ = {**message.__dict__}
    records: Any = message.content.items()
    delivered.content = RecordDict({name: _copy_record(record) for name, record in records})
    return delivered


def _copy_record(record: Any) -> Any:
    return lend_record(record) if isinstance(record, ArrayRecord) else type(record)(dict(record))


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
    """Run a server's main function against in-process nodes, or those of another grid, such as `StackedGrid`."""
    grid = (make_grid or InProcessGrid)(client_app, num_nodes, run_config)
    context = Context(grid.run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(run_config))
    server_main(grid, context)
