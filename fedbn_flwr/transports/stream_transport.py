"""The server's end of a layer-wise step over a side channel: one Flower message a node and round.

The nodes' end is in `stream_node.py`; the streams themselves are in `stream_server.py`.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.server.ask_nodes import question_of
from fedbn_flwr.server.passing_grid import PassingGrid
from fedbn_flwr.server.replies import Refusal, leave_out
from fedbn_flwr.server.secure_grid import SumFailedError, sum_exchange
from fedbn_flwr.transports.message_records import (
    ADDRESS,
    LACKS_ARRAYS,
    REQUEST,
    SIDE_CHANNEL,
    TOKEN,
    UNREACHABLE,
    read_request,
)
from fedbn_flwr.transports.nodes_transport import NodesFailedError, Participant, join_nodes
from fedbn_flwr.transports.stream_messages import MaskedRequest, NodeRequest, pack_frame
from fedbn_flwr.transports.stream_server import NodeLink, SideChannel
from fedbn_flwr.wire import masked

#: where a deployment's server names what a run does not: the port to listen on, the address by which sites reach it,
#: and certificate and private key, or `none` if a proxy in front of it has them
PORT_VARIABLE, ADDRESS_VARIABLE = "FEDBN_FLWR_EXCHANGE_PORT", "FEDBN_FLWR_EXCHANGE_ADDRESS"
CERTIFICATE_VARIABLE, KEY_VARIABLE = "FEDBN_FLWR_EXCHANGE_CERTIFICATE", "FEDBN_FLWR_EXCHANGE_KEY"


class UnreachableError(RuntimeError):
    """No node can be reached by the side channel."""


class StreamTransport:
    """A `NodesTransport` over a side channel, in one attempt of a round.

    `connect` and `advance` raise NodesFailedError if nodes fail, are late, or send what cannot be combined. A node that
    fails only after the last answer has no final reply, and the step ends without the node.
    """

    def __init__(self, grid: Grid, messages: Sequence[Message], channel: SideChannel, timeout: float) -> None:
        self._grid, self._messages, self._side_channel, self._timeout = grid, messages, channel, timeout
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

        #: whether requests come under masks
        self._masked = any(masked.SECURE in message.content for message in messages)

    def connect(self, seconds: float) -> None:
        """Send the messages and wait until every node's stream is there; UnreachableError if none comes."""
        ids = self._grid.push_messages(self._messages)
        self._awaited = {sent: each.metadata.dst_node_id for sent, each in zip(ids, self._messages, strict=True)}
        self._wait(lambda link: link.is_connected or bool(link.failure), seconds, "connect to the side channel")
        links = self._side_channel.links
        if not any(link.is_connected for link in links.values()) and self._late_or_unreachable:
            reasons = (f"node {node}: {link.failure}" for node, link in links.items())
            raise UnreachableError("; ".join(reasons))
        self._require_sound()

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Send every node the answer, and return the nodes' next requests."""
        links, began = self._side_channel.links, time.perf_counter()
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
        self._side_channel.close()
        if spent := self._seconds:
            text = "%d exchanges over the side channel in %.3f s, the median of them in %.2f ms"
            log(INFO, text, len(spent), sum(spent), 1000 * median(spent))
        wanted = {node for node, link in self._side_channel.links.items() if not link.failure}
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
        self._side_channel.close()

    def _wait(self, is_over: Callable[[NodeLink], bool], seconds: float, what: str) -> None:
        """Wait until it is over for every node; whoever is late then has failed."""
        self._side_channel.wait(is_over, seconds, self._look)
        for node, link in self._side_channel.links.items():
            if not is_over(link):
                self._late_or_unreachable.add(node)
                link.fail(f"it did not {what} within {seconds:g} s")

    def _look(self) -> None:
        """Read Flower's replies, which may be errors, and name the nodes that have failed where others have not."""
        self._pull()
        if any(link.is_connected for link in self._side_channel.links.values()):
            self._name_failures()

    def _pull(self) -> None:
        for reply in self._grid.pull_messages(list(self._awaited)):
            if not (question := question_of(reply, self._awaited)):
                continue
            node = self._awaited.pop(question)
            link = self._side_channel.links[node]
            if reply.has_error():
                link.fail(f"it failed: {reply.error.reason}")
            elif why := _why_unreachable(reply):
                self._late_or_unreachable.add(node)
                link.fail(f"it cannot use the side channel: {why}")
            self._replies[node] = reply

    def _name_failures(self) -> None:
        """Say in the log which nodes have failed, once each."""
        for node, link in self._side_channel.links.items():
            if link.failure and node not in self._named:
                self._named[node] = leave_out(node, link.failure)

    def _require_sound(self) -> None:
        """Raise NodesFailedError if nodes have failed."""
        self._name_failures()
        if self._named:
            raise NodesFailedError(self._named, self._named.values())

    def _in_order(self, requests: Mapping[int, NodeRequest | MaskedRequest]) -> Requests:
        """Return all nodes' requests, in the order of the participants; under masks, the one row of their mean."""
        if self._masked:
            return self._summed(requests)
        plain = {node: each for node, each in requests.items() if isinstance(each, NodeRequest)}
        if not self.participants:
            people = (Participant(each.partition, node, each.num_examples) for node, each in plain.items())
            self.participants = sorted(people)
        try:
            return join_nodes({each.node: plain[each.node].request for each in self.participants})
        except NodesFailedError as failure:
            for refusal in failure.reasons:
                self._named[refusal.node] = refusal
                self._side_channel.links[refusal.node].fail(refusal.reason)
            raise

    def _summed(self, requests: Mapping[int, NodeRequest | MaskedRequest]) -> Requests:
        """Return the mean of all nodes' requests, as one row."""
        try:
            mean = sum_exchange(requests)
        except SumFailedError as failure:
            self._named |= {node: leave_out(node, reason) for node, reason in failure.reasons.items()}
            raise NodesFailedError(failure.reasons, [self._named[node] for node in failure.reasons]) from None
        metrics: Any = mean[wire.METRICS]
        first = next(iter(mean.nodes))
        self.participants = [Participant(mean.nodes[first], first, metrics[wire.NUM_EXAMPLES])]
        return read_request(mean)


def _why_unreachable(reply: Message) -> str:
    """Return why a node could not use the side channel; nothing if it could."""
    report: Any = reply.content.config_records.get(wire.REPORT, {})
    if REQUEST in reply.content or LACKS_ARRAYS in report:
        return "its client knows none"
    return str(report.get(UNREACHABLE, ""))


@dataclass(frozen=True)
class StreamOptions:
    """Where the server listens, and how long it waits."""

    port: int
    #: host and port as sites see them
    address: str
    #: private key and certificate chain; None where a proxy ends TLS
    certificates: tuple[bytes, bytes] | None
    #: seconds that nodes have to connect, and for one exchange
    connect_timeout: float
    exchange_timeout: float

    @classmethod
    def of(cls, port: int, address: str, connect_timeout: float, exchange_timeout: float) -> "StreamOptions | None":
        """Return the options of a run, completed from the environment; None if there is to be no channel.

        `port` is -1 where the environment decides, and 0 for none. ValueError names what is missing.
        """
        port = int(os.environ.get(PORT_VARIABLE, 0)) if port < 0 else port
        if not port:
            return None
        address = address or os.environ.get(ADDRESS_VARIABLE, "")
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal():
            raise ValueError(f"exchange-address must be HOST:PORT as the sites see the server, got {address!r}")
        return cls(port, address, _certificates(), connect_timeout, exchange_timeout)


class StreamGrid(PassingGrid):
    """A grid in front of Flower's own, which must run all nodes at the same time.

    It listens while a layer-wise step lasts. If no node reaches it, or the port cannot be had, the step is left to
    messages, and the log says once why.
    """

    def __init__(self, grid: Grid, options: StreamOptions) -> None:
        super().__init__(grid)
        self._options = options
        self._why_not = ""

    @property
    def masks_steps(self) -> bool:
        """Nodes mask what they send over a side channel."""
        return True

    def open_step(self, messages: Sequence[Message]) -> StreamTransport | None:
        """Send the messages, and wait until the nodes have connected; None if none can.

        NodesFailedError names the nodes that did not connect where others did.
        """
        nodes = [message.metadata.dst_node_id for message in messages]
        options = self._options
        try:
            channel = SideChannel(nodes, f"[::]:{options.port}", options.certificates)
        except RuntimeError:
            self._leave_to_messages(f"port {options.port} cannot be had")
            return None
        for message in messages:
            access = {ADDRESS: options.address, TOKEN: channel.tokens[message.metadata.dst_node_id]}
            message.content[SIDE_CHANNEL] = ConfigRecord(dict(access))
        step = StreamTransport(self._grid, messages, channel, options.exchange_timeout)
        try:
            step.connect(options.connect_timeout)
        except UnreachableError as error:
            step.abandon()
            self._leave_to_messages(str(error))
            return None
        except BaseException:
            step.abandon()
            raise
        if self._why_not:
            log(INFO, "The side channel can be used again")
        self._why_not = ""
        return step

    def _leave_to_messages(self, reason: str) -> None:
        if not self._why_not:
            log(WARNING, "Layer-wise steps go by messages, the side channel cannot be used: %s", reason)
        self._why_not = reason


def _certificates() -> tuple[bytes, bytes] | None:
    certificate, key = (os.environ.get(name, "") for name in (CERTIFICATE_VARIABLE, KEY_VARIABLE))
    if certificate == "none":
        return None
    try:
        return Path(key).read_bytes(), Path(certificate).read_bytes()
    except OSError as error:
        raise ValueError(
            f"exchange-port needs {CERTIFICATE_VARIABLE} and {KEY_VARIABLE} in the ServerApp's environment, the files "
            f"of its certificate and private key ({CERTIFICATE_VARIABLE}=none where a proxy has them): {error}"
        ) from error
