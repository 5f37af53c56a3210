"""The server's end of layer-wise steps over a side channel: a grid that takes messages to nodes another way.

The nodes' end is in `side_channel_client.py`; the streams themselves are in `side_channel_server.py`.
"""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.server.grids import PassingGrid, identify, question_of
from fedbn_flwr.transports.message_records import ADDRESS, SIDE_CHANNEL, TOKEN, UNREACHABLE, StepPosition
from fedbn_flwr.transports.side_channel_frames import pack_frame
from fedbn_flwr.transports.side_channel_server import NodeLink, SideChannel

#: where a deployment's server names what a run does not: the port to listen on, the address by which sites reach it,
#: and certificate and private key, or `none` if a proxy in front of it has them
PORT_VARIABLE, ADDRESS_VARIABLE = "FEDBN_FLWR_EXCHANGE_PORT", "FEDBN_FLWR_EXCHANGE_ADDRESS"
CERTIFICATE_VARIABLE, KEY_VARIABLE = "FEDBN_FLWR_EXCHANGE_CERTIFICATE", "FEDBN_FLWR_EXCHANGE_KEY"
#: seconds after which the grid looks for Flower's replies, which may be errors of nodes that others wait for
_LOOK = 0.25


@dataclass(frozen=True)
class SideChannelOptions:
    """Where the server listens, and how long it waits."""

    port: int
    #: host and port as sites see them
    address: str
    #: private key and certificate chain; None where a proxy ends TLS
    certificates: tuple[bytes, bytes] | None
    #: seconds that nodes have to connect
    connect_timeout: float

    @classmethod
    def of(cls, port: int, address: str, connect_timeout: float) -> "SideChannelOptions | None":
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
        return cls(port, address, _certificates(), connect_timeout)


class SideChannelGrid(PassingGrid):
    """A grid in front of Flower's own, which must run all nodes at the same time.

    The message that begins an attempt at a layer-wise step goes by Flower, and tells the node where the side channel
    is. All other messages of the attempt go over the side channel, until the reply that ends the step, which comes by
    Flower. If no node reaches the side channel, or the port cannot be had, all messages go by Flower, and the log says
    once why. A node whose stream fails has an error as its reply.

    Ids of what goes over the channel are of messages that Flower never sees. `ask_nodes`, which pushes and pulls, uses
    the channel; `send_and_receive` goes by Flower.
    """

    def __init__(self, grid: Grid, options: SideChannelOptions) -> None:
        super().__init__(grid)
        self._options = options
        self._attempt: _Attempt | None = None
        self._why_not = ""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; those of a layer-wise step over the side channel, to the nodes that it leads to."""
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != wire.LAYERWISE:
            return self._grid.push_messages(messages)
        if StepPosition.of(messages[0].content).index == 0:
            self.end_attempt()
            self._attempt = self._begin(messages)
            if self._attempt:
                return [self._attempt.expect_reply(message) for message in messages]
        elif self._attempt:
            return [self._attempt.send(message) for message in messages]
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; those over the side channel are waited for, but not for long."""
        ids = list(message_ids)
        asked = self._attempt.asked.keys() & ids if self._attempt else set[str]()
        replies = self._attempt.pull(asked) if self._attempt and asked else []
        others = [each for each in ids if each not in asked]
        return [*replies, *self._grid.pull_messages(others)] if others else replies

    def end_attempt(self) -> None:
        """Close the side channel."""
        attempt, self._attempt = self._attempt, None
        if attempt:
            attempt.end()

    def _begin(self, messages: Sequence[Message]) -> "_Attempt | None":
        """Return an attempt whose nodes are there, or have failed; None if no node can use the side channel."""
        options = self._options
        try:
            nodes = [message.metadata.dst_node_id for message in messages]
            channel = SideChannel(nodes, f"[::]:{options.port}", options.certificates)
        except RuntimeError:
            self._leave_to_messages(f"port {options.port} cannot be had")
            return None
        attempt = _Attempt(self._grid, channel)
        try:
            why_not = attempt.connect(messages, options)
        except BaseException:
            channel.close()
            raise
        if why_not:
            channel.close()
            self._leave_to_messages(why_not)
            return None
        if self._why_not:
            log(INFO, "The side channel can be used again")
        self._why_not = ""
        return attempt

    def _leave_to_messages(self, reason: str) -> None:
        if not self._why_not:
            log(WARNING, "Layer-wise steps go by messages, the side channel cannot be used: %s", wire.printable(reason))
        self._why_not = reason


class _Attempt:
    """An attempt at a layer-wise step: the messages on their way, and the replies to them."""

    def __init__(self, grid: Grid, channel: SideChannel) -> None:
        self._grid, self._channel = grid, channel
        #: by their ids, the messages without a reply
        self.asked: dict[str, Message] = {}
        #: by Flower's ids of the messages that began the attempt, the nodes whose reply by Flower has not come
        self._awaited: dict[str, int] = {}
        self._by_flower: dict[int, Message] = {}
        #: from a message to the replies of all nodes
        self._seconds: list[float] = []
        self._began = 0.0

    def connect(self, messages: Sequence[Message], options: SideChannelOptions) -> str:
        """Tell the nodes where the channel is, and wait until they are there; return why none of them can come."""
        invitations = []
        for message in messages:
            node = message.metadata.dst_node_id
            access = ConfigRecord({ADDRESS: options.address, TOKEN: self._channel.tokens[node]})
            content = RecordDict({**message.content, SIDE_CHANNEL: access})
            invitations.append(Message(content, node, message.metadata.message_type))
        ids, links = self._grid.push_messages(invitations), self._channel.links
        self._awaited = dict(zip(ids, links, strict=True))
        deadline = time.monotonic() + options.connect_timeout
        while not self._channel.wait(_has_come, _LOOK) and time.monotonic() < deadline:
            self._look()
        out_of_reach = [link for link in links.values() if not _has_come(link)]
        for link in out_of_reach:
            link.fail(f"it did not connect to the side channel within {options.connect_timeout:g} s")
        out_of_reach += [links[node] for node, reply in self._by_flower.items() if _why_unreachable(reply)]
        if not out_of_reach or any(link.is_connected for link in links.values()):
            return ""
        return "; ".join(f"node {node}: {link.failure}" for node, link in links.items())

    def expect_reply(self, message: Message) -> str:
        """Note that a node owes the reply to a message, and return the message's id."""
        self._began = time.perf_counter()
        self.asked[identify(message)] = message
        return message.metadata.message_id

    def send(self, message: Message) -> str:
        """Send a node a message, and return its id; by Flower, if the side channel does not lead to the node."""
        link = self._channel.links[message.metadata.dst_node_id]
        if not link.is_open:
            (sent,) = self._grid.push_messages([message])
            return sent
        link.send(pack_frame(message.content))
        return self.expect_reply(message)

    def pull(self, ids: Collection[str]) -> list[Message]:
        """Return the replies to messages that are there, after a moment."""
        self._channel.wait(lambda link: link.has_spoken, _LOOK)
        replies = {each: reply for each in ids if (reply := self._reply_to(self.asked[each]))}
        self.asked = {each: message for each, message in self.asked.items() if each not in replies}
        if len(replies) < len(ids):
            self._look()
        elif not self._by_flower:
            self._seconds.append(time.perf_counter() - self._began)
        return list(replies.values())

    def end(self) -> None:
        """End every node's stream; the first message of the next attempt ends a step that is still open there."""
        self._channel.close()
        if spent := self._seconds[1:]:
            text = "%d exchanges over the side channel in %.3f s, the median of them in %.2f ms"
            log(INFO, text, len(spent), sum(spent), 1000 * median(spent))

    def _reply_to(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        link, by_flower = self._channel.links[node], self._by_flower.get(node)
        if link.failure:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, link.failure), reply_to=message)
        if link.reply is not None:
            return Message(link.reply, reply_to=message)
        if by_flower is None:
            return None
        return Message(by_flower.error if by_flower.has_error() else by_flower.content, reply_to=message)

    def _look(self) -> None:
        """Read the replies that have come by Flower: of nodes that are done with the side channel, or cannot use it."""
        for reply in self._grid.pull_messages(list(self._awaited)):
            if not (question := question_of(reply, self._awaited)):
                continue
            node = self._awaited.pop(question)
            link, self._by_flower[node] = self._channel.links[node], reply
            if reply.has_error():
                link.fail(reply.error.reason or "it failed")
            elif why := _why_unreachable(reply):
                link.fail(f"it cannot use the side channel: {why}")
            else:
                link.finish()


def _has_come(link: NodeLink) -> bool:
    """Return whether a node is there, or need not be waited for."""
    return link.is_connected or link.has_spoken


def _why_unreachable(reply: Message) -> str:
    """Return why a node could not use the side channel; nothing if it could."""
    report: Any = reply.content.config_records.get(wire.REPORT, {}) if reply.has_content() else {}
    return str(report.get(UNREACHABLE, ""))


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
