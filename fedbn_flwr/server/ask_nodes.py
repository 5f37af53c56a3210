"""One question to some nodes and their answers, inside a round, with a deadline of its own."""

import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid


def ask_nodes(grid: Grid, messages: Sequence[Message], timeout: float, poll: float = 0.02) -> dict[int, Message]:
    """Send, and wait for the answers until the deadline; by node, the ones that did not answer being absent.

    Flower's `send_and_receive` sleeps three seconds between polls in a deployment; this one starts with `poll` and
    slows down to a second. An error reply may not name its node, so answers are matched by message id.
    """
    sent = dict(zip(grid.push_messages(messages), messages, strict=True))
    nodes = {message_id: message.metadata.dst_node_id for message_id, message in sent.items()}
    answers: dict[int, Message] = {}
    deadline = time.monotonic() + timeout
    while nodes:
        for answer in grid.pull_messages(list(nodes)):
            answers[nodes.pop(answer.metadata.reply_to_message_id)] = answer
        if not nodes or time.monotonic() > deadline:
            break
        time.sleep(poll)
        poll = min(poll * 1.5, 1.0)
    return answers
