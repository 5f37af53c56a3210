"""Messages to some nodes and their replies, inside a round, with a deadline."""

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.wire.masked import Summed


@runtime_checkable
class AskingGrid(Protocol):
    """A grid that waits for replies by itself, because it makes something of all of them."""

    def ask(self, messages: Sequence[Message], timeout: float) -> dict[int, Message]:
        """Send messages and wait for the replies, at most `timeout` seconds; return the replies by node."""


def ask_nodes(grid: Grid, messages: Sequence[Message], timeout: float, poll: float = 0.02) -> dict[int, Message]:
    """Send messages and wait for the replies, at most `timeout` seconds; return the replies by node.

    Nodes that do not reply in time are absent. Flower's `send_and_receive` sleeps three seconds between polls in a
    deployment; this function starts with `poll` seconds and slows down to one second. An error reply may not name its
    node, so replies are matched by message id.
    """
    if isinstance(grid, AskingGrid):
        return grid.ask(messages, timeout)
    sent = dict(zip(grid.push_messages(messages), messages, strict=True))
    nodes = {message_id: message.metadata.dst_node_id for message_id, message in sent.items()}
    replies: dict[int, Message] = {}
    deadline = time.monotonic() + timeout
    while nodes:
        for reply in grid.pull_messages(list(nodes)):
            replies[nodes.pop(question_of(reply, nodes))] = reply
            if reply.has_content() and isinstance(reply.content, Summed):
                # the mean of several replies: the others will not come
                nodes = {question: node for question, node in nodes.items() if node not in reply.content.nodes}
        if not nodes or time.monotonic() > deadline:
            break
        time.sleep(poll)
        poll = min(poll * 1.5, 1.0)
    return replies


def question_of(reply: Message, nodes: dict[str, int]) -> str:
    """Return the id of the message that was answered; a node's own mod may have answered without saying it."""
    answered = reply.metadata.reply_to_message_id
    if answered in nodes:
        return answered
    return next(message_id for message_id, node in nodes.items() if node == reply.metadata.src_node_id)
