"""The server's end of a layer-wise step over a side channel: one Flower message a node and round.

The nodes' end is in `stream_node.py`; the streams themselves are in `stream_server.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from logging import INFO
from statistics import median
from typing import Any

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.server.ask_nodes import question_of
from fedbn_flwr.server.replies import Refusal
from fedbn_flwr.transports.message_records import LACKS_ARRAYS, REQUEST, UNREACHABLE
from fedbn_flwr.transports.nodes import NodesFailedError, Participant, join_nodes, leave_out
from fedbn_flwr.transports.stream_messages import NodeRequest, pack_frame
from fedbn_flwr.transports.stream_server import NodeLink, SideChannel


class UnreachableError(RuntimeError):
    """No node can be reached by the side channel."""


class StreamTransport:
    """A `NodesTransport` over a side channel, in one attempt of a round.

    `connect` and `advance` raise NodesFailedError if nodes fail, are late, or send what cannot be combined. A node that
    fails only after the last answer has no final reply, and the step ends without the node.
    """

    def __init__(self, grid: Grid, messages: Sequence[Message], channel: SideChannel, timeout: float) -> None:
        self._grid, self._messages, self._channel, self._timeout = grid, messages, channel, timeout
        #: the nodes in the order of their partitions, from the first requests on
        self.participants: list[Participant] = []
        #: by message id, the nodes whose reply has not come
        self._awaited: dict[str, int] = {}
        self._replies: dict[int, Message] = {}
        self._late_or_unreachable: set[int] = set()
        #: the nodes whose failure is in the log, and what is said there
        self._named: dict[int, Refusal] = {}
        #: from an answer to the next requests, each time
        self._seconds: list[float] = []

    def connect(self, seconds: float) -> None:
        """Send the messages and wait until every node's stream is there; UnreachableError if none comes."""
        ids = self._grid.push_messages(self._messages)
        self._awaited = {sent: each.metadata.dst_node_id for sent, each in zip(ids, self._messages, strict=True)}
        self._wait(lambda link: link.is_connected or bool(link.failure), seconds, "connect to the side channel")
        links = self._channel.links
        if not any(link.is_connected for link in links.values()) and self._late_or_unreachable:
            reasons = (f"node {node}: {link.failure}" for node, link in links.items())
            raise UnreachableError("; ".join(reasons))
        self._require_sound()

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Send every node the answer, and return the nodes' next requests."""
        links, began = self._channel.links, time.perf_counter()
        if answer is not None:
            frame = pack_frame(answer)
            for link in links.values():
                link.answer(frame)
        self._wait(lambda link: link.has_spoken, self._timeout, "say what its next BN layer sees")
        if answer is not None:
            self._seconds.append(time.perf_counter() - began)
        done = [link for link in links.values() if link.is_done]
        asking = [link for link in links.values() if link.request and not link.failure]
        is_at_end = len(done) >= max(len(asking), 1)
        for link in asking if is_at_end else done:
            link.failure = (
                "it is at a BN layer where the others are at their end"
                if is_at_end
                else "it is at its end where the others are at a BN layer"
            )
        if is_at_end:
            self._name_failures()
            return None
        self._require_sound()
        return self._in_order({node: link.request for node, link in links.items() if link.request})

    def replies(self) -> list[Message]:
        """Return the replies of the nodes that have taken the step; errors too."""
        self._channel.close()
        if spent := self._seconds:
            text = "%d exchanges over the side channel in %.3f s, the median of them in %.2f ms"
            log(INFO, text, len(spent), sum(spent), 1000 * median(spent))
        wanted = {node for node, link in self._channel.links.items() if not link.failure}
        deadline, poll = time.monotonic() + self._timeout, 0.02
        while not wanted <= self._replies.keys() and time.monotonic() < deadline:
            self._pull()
            time.sleep(poll)
            poll = min(poll * 1.5, 1.0)
        for node in sorted(wanted - self._replies.keys()):
            leave_out(node, "it did not answer in time")
        return [reply for node, reply in self._replies.items() if node in wanted]

    def abandon(self) -> None:
        """End every node's stream, so that it forgets the step."""
        self._channel.close()

    def _wait(self, is_over: Callable[[NodeLink], bool], seconds: float, what: str) -> None:
        """Wait until it is over for every node; whoever is late then has failed."""
        self._channel.wait(is_over, seconds, self._look)
        for node, link in self._channel.links.items():
            if not is_over(link):
                self._late_or_unreachable.add(node)
                link.fail(f"it did not {what} within {seconds:g} s")

    def _look(self) -> None:
        """Read Flower's replies, which may be errors, and name the nodes that have failed where others have not."""
        self._pull()
        if any(link.is_connected for link in self._channel.links.values()):
            self._name_failures()

    def _pull(self) -> None:
        for reply in self._grid.pull_messages(list(self._awaited)):
            node = self._awaited.pop(question_of(reply, self._awaited))
            link = self._channel.links[node]
            if reply.has_error():
                link.fail(f"it failed: {reply.error.reason}")
            elif why := _why_unreachable(reply):
                self._late_or_unreachable.add(node)
                link.fail(f"it cannot use the side channel: {why}")
            self._replies[node] = reply

    def _name_failures(self) -> None:
        """Say in the log which nodes have failed, once each."""
        for node, link in self._channel.links.items():
            if link.failure and node not in self._named:
                self._named[node] = leave_out(node, link.failure)

    def _require_sound(self) -> None:
        """Raise NodesFailedError if nodes have failed."""
        self._name_failures()
        if self._named:
            raise NodesFailedError(self._named, self._named.values())

    def _in_order(self, requests: Mapping[int, NodeRequest]) -> Requests:
        """Return all nodes' requests, in the order of the participants."""
        if not self.participants:
            people = (Participant(each.partition, node, each.num_examples) for node, each in requests.items())
            self.participants = sorted(people)
        try:
            return join_nodes({each.node: requests[each.node].request for each in self.participants})
        except NodesFailedError as failure:
            for refusal in failure.reasons:
                self._named[refusal.node] = refusal
                self._channel.links[refusal.node].fail(refusal.reason)
            raise


def _why_unreachable(reply: Message) -> str:
    """Return why a node could not use the side channel; nothing if it could."""
    report: Any = reply.content.config_records.get(wire.REPORT, {})
    if REQUEST in reply.content or LACKS_ARRAYS in report:
        return "its client knows none"
    return str(report.get(UNREACHABLE, ""))
