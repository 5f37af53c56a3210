"""Grids in front of others, the wait for their nodes, and messages through a grid to some nodes,
inside a round.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import count
from logging import INFO, WARNING
from threading import Thread
from typing import TYPE_CHECKING
from uuid import uuid4

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.server.replies import CannotTrainError
from fedbn_flwr.wire.pooled import Summed

if TYPE_CHECKING:
    from flwr.supercore.run import Run

#: seconds between log entries while nodes are waited for
SAY_EVERY = 60.0
#: of the ids of messages that do not get theirs from Flower; processes may share the first, and
#: hand over messages
_PREFIX = uuid4()
_NUMBERS = count()


def wait_for_nodes(
    grid: Grid, wanted: int, patience: float, fewest: int | None = None
) -> list[int]:
    """Return the connected nodes as soon as there are `wanted`, or after `patience` seconds if
    there are `fewest`. Nobody waits for ever for nodes of a grid that is complete.

    Raises `CannotTrainError` if there are too few.
    """
    in_vain = patience == float("inf") and getattr(grid, "is_complete", False)
    began = said = time.monotonic()
    while len(nodes := sorted(grid.get_node_ids())) < wanted:
        now = time.monotonic()
        there = ""
        if nodes:
            there = f": {', '.join(f'node {node}' for node in nodes)}"
        if in_vain or now > began + patience:
            if len(nodes) >= (wanted if fewest is None else fewest):
                break
            if in_vain:
                raise CannotTrainError(
                    f"the strategy wants {wanted} nodes, and {len(nodes)} are all that the grid "
                    "has: see min_available_nodes, min_train_nodes and min_evaluate_nodes"
                )
            raise CannotTrainError(
                f"{len(nodes)} of {wanted} nodes connected within {patience:g} seconds{there}"
            )
        if now > said + SAY_EVERY:
            log(INFO, "Waiting for nodes: %d of %d are connected%s", len(nodes), wanted, there)
            said = now
        time.sleep(0.5)
    return nodes


def wait_for_all(grid: Grid, pause: float = 0.5) -> list[int]:
    """Return the nodes of a simulation once two looks at them agree; it ends with its SuperLink
    from now on.
    """
    _end_with_superlink()
    before = list[int]()
    while not (nodes := sorted(grid.get_node_ids())) or nodes != before:
        before = nodes
        time.sleep(pause)
    return nodes


def is_simulated(grid: Grid) -> bool:
    """Return whether a grid has the nodes of Flower's simulation."""
    # Flower does not say; the class has moved from module to module under this name
    return any(each.__name__ == "InMemoryGrid" for each in type(grid).__mro__)


def _end_with_superlink() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        log(WARNING, "The SuperLink has ended, and so does this run")  # it would go on unseen
        os._exit(1)  # Flower's own way out waits for an answer of the SuperLink

    # a script's parent is a shell, which may end before the script
    if sys.argv[0].endswith("flwr-simulation"):
        Thread(target=watch, daemon=True).start()


def ask_nodes(
    grid: Grid, messages: Sequence[Message], timeout: float, poll: float = 0.02
) -> dict[int, Message]:
    """Send messages and wait for the replies, at most `timeout` seconds.

    Return the replies by node.

    Nodes that do not reply in time are absent. Flower's `send_and_receive` sleeps three seconds
    between polls in a deployment; this function starts with `poll` seconds and slows down to one
    second. An error reply may not name its node, so replies are matched by message id.
    """
    sent = dict(zip(grid.push_messages(messages), messages, strict=True))
    nodes = {message_id: message.metadata.dst_node_id for message_id, message in sent.items()}
    replies: dict[int, Message] = {}
    deadline = time.monotonic() + timeout
    while nodes:
        for reply in grid.pull_messages(list(nodes)):
            question = question_of(reply, nodes)
            if not question:
                continue
            replies[nodes.pop(question)] = reply
            if reply.has_content() and isinstance(reply.content, Summed):
                # the mean of several replies: the others will not come
                nodes = {
                    question: node
                    for question, node in nodes.items()
                    if node not in reply.content.nodes
                }
        if not nodes or time.monotonic() > deadline:
            break
        time.sleep(poll)
        poll = min(poll * 1.5, 1.0)
    return replies


def identify(message: Message) -> str:
    """Give a message the id that it otherwise gets on its way."""
    # a UUID for each takes 0.45 ms on a virtual machine, most of it for the system's random bytes
    metadata = message.metadata
    if "_message_id" not in metadata.__dict__:
        raise CannotTrainError(
            f"Flower {version('flwr')} keeps the ids of messages elsewhere than Flower 1.42, the "
            "newest that was tried: train with `flwr run`"
        )
    metadata.__dict__["_message_id"] = f"{_PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
    return metadata.message_id


def question_of(reply: Message, nodes: dict[str, int]) -> str:
    """Return the id of the open message that was answered, which a node's own mod may leave out; ""
    for none.
    """
    answered = reply.metadata.reply_to_message_id
    source = reply.metadata.src_node_id
    if answered not in nodes:
        answered = next((message_id for message_id, node in nodes.items() if node == source), "")
    if not answered:
        log(WARNING, "A reply of node %d is left out: nothing that it was asked is open", source)
    return answered


class PassingGrid(Grid):
    """A grid in front of another one, which may change: what is not overridden is passed on."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        behind = passing(grid)
        self.is_complete = getattr(grid, "is_complete", False)
        #: the names of sites by node, if a grid behind this one learns them
        self.names: dict[int, str] = behind.names if behind else {}
        #: connected nodes that a grid behind this one hides, because their data do not fit
        self.unfit: set[int] = behind.unfit if behind else set()

    def outgoing(self, messages: list[Message]) -> list[Message]:
        """Return what is sent in the place of messages."""
        return messages

    def incoming(self, replies: list[Message]) -> list[Message]:
        """Return what is handed over in the place of replies."""
        return replies

    def end_attempt(self) -> None:
        """End an attempt at a layer-wise step."""
        behind = passing(self._grid)
        if behind:
            behind.end_attempt()

    def set_run(self, run: "Run") -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> "Run":
        """Pass on."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Pass on."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, as `outgoing` has them."""
        return self._grid.push_messages(self.outgoing(list(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, as `incoming` has them."""
        return self.incoming(list(self._grid.pull_messages(message_ids)))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies, as `outgoing` and `incoming` have them."""
        sent = self.outgoing(list(messages))
        if sent:
            return self.incoming(list(self._grid.send_and_receive(sent, timeout=timeout)))
        return []


def passing(grid: Grid) -> PassingGrid | None:
    """Return a grid that is in front of another one; None for the grid of nodes itself."""
    if isinstance(grid, PassingGrid):
        return grid
    return None
