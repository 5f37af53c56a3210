"""The server's end of layer-wise steps over a side channel: a grid that takes messages to nodes
another way.

There is one gRPC stream a node, for one attempt at a layer-wise step. A node is admitted by a
token, which it has from an ordinary Flower message. A token opens one stream, and is worth nothing
when the attempt has ended. The nodes' end is in `side_channel_client.py`.

Both ends say `alive`, in place of gRPC's keepalive. There, what counts is not
`grpc.keepalive_timeout_ms` but `grpc.http2.ping_timeout_ms`, a minute unless it is set (gRPC 1.85:
a cut connection was noticed after 60 s with 4 s and 2 s asked for, after 2 s with this option); and
a proxy answers pings for a node that is gone.
"""

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import DEBUG, INFO, WARNING
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import grpc
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.server.grids import PassingGrid, identify, question_of
from fedbn_flwr.transports import side_channel_frames as frames
from fedbn_flwr.transports.message_records import (
    ADDRESS,
    SIDE_CHANNEL,
    TOKEN,
    UNREACHABLE,
    StepPosition,
)

#: where a deployment's server names what a run does not: the port to listen on, the address by
#: which sites reach it, and certificate and private key, or `none` if a proxy in front of it has
#: them
PORT_VARIABLE = "FEDBN_FLWR_EXCHANGE_PORT"
ADDRESS_VARIABLE = "FEDBN_FLWR_EXCHANGE_ADDRESS"
CERTIFICATE_VARIABLE = "FEDBN_FLWR_EXCHANGE_CERTIFICATE"
KEY_VARIABLE = "FEDBN_FLWR_EXCHANGE_KEY"
#: seconds after which the grid looks for Flower's replies, which may be errors of nodes that others
#: wait for
_LOOK = 0.25
_OPTIONS = [
    ("grpc.max_receive_message_length", frames.TRANSPORT_LIMIT),
    ("grpc.max_metadata_size", 8192),
    # otherwise a second server would share the port, and get half of the nodes
    ("grpc.so_reuseport", 0),
]


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
        """Return the options of a run, completed from the environment; None if there is to be no
        channel.

        `port` is -1 where the environment decides, and 0 for none. ValueError names what is
        missing.
        """
        if port < 0:
            given = os.environ.get(PORT_VARIABLE) or "0"
            if not given.isdecimal():
                raise ValueError(f"{PORT_VARIABLE} must be the number of a port, got {given!r}")
            port = int(given)
        if not port:
            return None
        address = address or os.environ.get(ADDRESS_VARIABLE, "")
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal():
            raise ValueError(
                f"exchange-address must be HOST:PORT as the sites see the server, got {address!r}"
            )
        return cls(port, address, _certificates(), connect_timeout)


class SideChannelGrid(PassingGrid):
    """A grid in front of Flower's own, which must run all nodes at the same time.

    The message that begins an attempt at a layer-wise step goes by Flower, and tells the node where
    the side channel is. All other messages of the attempt go over the side channel, until the reply
    that ends the step, which comes by Flower. If no node reaches the side channel, or the port
    cannot be had, all messages go by Flower, and the log says once why. A node whose stream fails
    has an error as its reply.

    Ids of what goes over the channel are of messages that Flower never sees. `ask_nodes`, which
    pushes and pulls, uses the channel; `send_and_receive` goes by Flower.
    """

    def __init__(self, grid: Grid, options: SideChannelOptions) -> None:
        super().__init__(grid)
        self._options = options
        self._attempt: _Attempt | None = None
        self._has_failed = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; those of a layer-wise step over the side channel, to the nodes that it
        leads to.
        """
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
        """Return the replies that are there.

        Those over the side channel are waited for, but not for long.
        """
        ids = list(message_ids)
        if self._attempt:
            asked = self._attempt.asked.keys() & ids
        else:
            asked = set[str]()
        replies = []
        if self._attempt and asked:
            replies = self._attempt.pull(asked)
        others = [each for each in ids if each not in asked]
        if others:
            return [*replies, *self._grid.pull_messages(others)]
        return replies

    def end_attempt(self) -> None:
        """Close the side channel."""
        attempt = self._attempt
        self._attempt = None
        if attempt:
            attempt.end()

    def _begin(self, messages: Sequence[Message]) -> "_Attempt | None":
        """Return an attempt whose nodes are there, or have failed; None if no node can use the side
        channel.
        """
        try:
            return _Attempt(self._grid, messages, self._options)
        except UnusableError as error:
            if not self._has_failed:
                log(
                    WARNING,
                    "Layer-wise steps go by messages, the side channel cannot be used: %s",
                    error,
                )
            self._has_failed = True
            return None


class UnusableError(RuntimeError):
    """The port of the side channel cannot be had, or no node can come."""


class _Attempt:
    """An attempt at a layer-wise step: the messages on their way, and the replies to them.

    Its nodes are there, or have failed. UnusableError if there can be no side channel.
    """

    def __init__(
        self, grid: Grid, messages: Sequence[Message], options: SideChannelOptions
    ) -> None:
        self._grid = grid
        #: by their ids, the messages without a reply
        self.asked: dict[str, Message] = {}
        #: by Flower's ids of the messages that began the attempt, the nodes whose reply by Flower
        #: has not come
        self._awaited: dict[str, int] = {}
        self._by_flower: dict[int, Message] = {}
        #: from a message to the replies of all nodes
        self._seconds: list[float] = []
        self._began = 0.0
        nodes = [message.metadata.dst_node_id for message in messages]
        try:
            self._channel = SideChannel(nodes, f"[::]:{options.port}", options.certificates)
        except RuntimeError:
            raise UnusableError(f"port {options.port} cannot be had") from None
        try:
            self._connect(messages, options)
        except BaseException:
            self._channel.close()
            raise

    def _connect(self, messages: Sequence[Message], options: SideChannelOptions) -> None:
        """Tell the nodes where the channel is, and wait until they are there; UnusableError if none
        can come.
        """
        invitations = []
        for message in messages:
            node = message.metadata.dst_node_id
            access = ConfigRecord({ADDRESS: options.address, TOKEN: self._channel.tokens[node]})
            content = RecordDict({**message.content, SIDE_CHANNEL: access})
            invitations.append(Message(content, node, message.metadata.message_type))
        ids = self._grid.push_messages(invitations)
        links = self._channel.links
        self._awaited = dict(zip(ids, links, strict=True))
        deadline = time.monotonic() + options.connect_timeout
        while (
            not self._channel.wait(lambda link: link.has_come, _LOOK)
            and time.monotonic() < deadline
        ):
            self._look()
        out_of_reach = [link for link in links.values() if not link.has_come]
        for link in out_of_reach:
            link.fail(
                f"it did not connect to the side channel within {options.connect_timeout:g} s"
            )
        out_of_reach += [
            links[node] for node, reply in self._by_flower.items() if _why_unreachable(reply)
        ]
        if out_of_reach and not any(link.is_connected for link in links.values()):
            reasons = [
                f"node {node}: {wire.printable(link.failure)}" for node, link in links.items()
            ]
            raise UnusableError("; ".join(reasons))

    def expect_reply(self, message: Message) -> str:
        """Note that a node owes the reply to a message, and return the message's id."""
        self._began = time.perf_counter()
        self.asked[identify(message)] = message
        return message.metadata.message_id

    def send(self, message: Message) -> str:
        """Send a node a message, and return its id; by Flower, if the side channel does not lead to
        the node.
        """
        link = self._channel.links[message.metadata.dst_node_id]
        if not link.is_open:
            (sent,) = self._grid.push_messages([message])
            return sent
        link.send(frames.pack_frame(message.content))
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
        """End every node's stream; the first message of the next attempt ends a step that is still
        open there.
        """
        self._channel.close()
        spent = self._seconds[1:]
        if spent:
            text = "%d exchanges over the side channel in %.3f s, the median of them in %.2f ms"
            log(INFO, text, len(spent), sum(spent), 1000 * median(spent))

    def _reply_to(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        link = self._channel.links[node]
        by_flower = self._by_flower.get(node)
        if link.failure:
            return Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, link.failure), reply_to=message
            )
        if link.reply is not None:
            return Message(link.reply, reply_to=message)
        if by_flower is None:
            return None
        return Message(
            by_flower.error if by_flower.has_error() else by_flower.content, reply_to=message
        )

    def _look(self) -> None:
        """Read the replies that have come by Flower: of nodes that are done with the side channel,
        or cannot use it.
        """
        for reply in self._grid.pull_messages(list(self._awaited)):
            question = question_of(reply, self._awaited)
            if not question:
                continue
            node = self._awaited.pop(question)
            link = self._channel.links[node]
            self._by_flower[node] = reply
            if reply.has_error():
                link.fail(reply.error.reason or "it failed")
            elif why := _why_unreachable(reply):
                link.fail(f"it cannot use the side channel: {why}")
            else:
                link.finish()


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
            f"exchange-port needs {CERTIFICATE_VARIABLE} and {KEY_VARIABLE} in the ServerApp's "
            "environment, the files of its certificate and private key "
            f"({CERTIFICATE_VARIABLE}=none where a proxy has them): {error}"
        ) from error


# ---- the streams ---------------------------------------------------------------------------------


class NodeLink:
    """One node of an attempt: what it has replied, and what it is to be sent."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.is_connected = False
        self.is_done = False
        #: to the latest message
        self.reply: RecordDict | None = None
        #: why it cannot go on
        self.failure = ""
        self._heard = 0.0
        self.outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    @property
    def is_open(self) -> bool:
        """Whether the node can be sent messages."""
        return self.is_connected and not (self.is_done or self.failure)

    @property
    def has_spoken(self) -> bool:
        """Whether nothing more is to be expected from it before the next message."""
        return self.is_done or self.reply is not None or bool(self.failure)

    @property
    def has_come(self) -> bool:
        """Whether the node is there, or need not be waited for."""
        return self.is_connected or self.has_spoken

    def connect(self) -> None:
        """Take note that its stream is there."""
        with self._changed:
            self.is_connected = True
            self._heard = time.monotonic()
            self._changed.notify_all()

    def hear(self, frame: bytes) -> None:
        """Take a frame; frames.FrameError if it is not one that a node may send now."""
        if frame == frames.ALIVE:
            content = None
        else:
            content = frames.read_frame(frame)
        with self._changed:
            self._heard = time.monotonic()
            if content is None:
                return
            end: Any = content.config_records.get(frames.END, {})
            reason = end.get(frames.REASON, "")
            if reason:
                self.fail(str(reason))
            elif self.has_spoken:
                raise frames.FrameError("it sent a frame where none is due")
            elif frames.END in content:
                self.finish()
            else:
                self.reply = content
                self._changed.notify_all()

    def finish(self) -> None:
        """Note that its reply comes by Flower, and end its stream."""
        with self._changed:
            self.is_done = True
            self._changed.notify_all()
        self.outgoing.put(None)

    def send(self, frame: bytes) -> None:
        """Send the node the next message."""
        with self._changed:
            self.reply = None
        self.outgoing.put(frame)

    def fail(self, reason: str) -> None:
        """Note why the node cannot go on, and end its stream; only the first reason counts, and
        none after its end.
        """
        with self._changed:
            if not (self.failure or self.is_done):
                self.failure = reason
                self._changed.notify_all()
        self.outgoing.put(None)

    def fail_if_silent(self) -> None:
        """Give the node up if nothing has come from it for too long."""
        if self.is_connected and time.monotonic() - self._heard > frames.SILENCE:
            self.fail(f"its side channel was silent for {frames.SILENCE:g} s")


class SideChannel:
    """Listens on a port, and admits the nodes of one attempt; without certificates it speaks no
    TLS.

    RuntimeError if the port cannot be had.
    """

    def __init__(
        self, nodes: Sequence[int], address: str, certificates: tuple[bytes, bytes] | None
    ) -> None:
        self._changed = threading.Condition()
        self.links = {node: NodeLink(self._changed) for node in nodes}
        self.tokens = {node: secrets.token_urlsafe(32) for node in nodes}
        #: by the digests of their tokens, the nodes that have not come yet: how long a look-up
        #: takes says nothing then
        self._awaited = {_digest(token): self.links[node] for node, token in self.tokens.items()}
        # a few more, for peers that are not admitted; where these come in hundreds, nodes wait for
        # their turn
        streams = len(nodes) + 16
        self._server = grpc.server(
            ThreadPoolExecutor(streams, "side-channel"),
            options=_OPTIONS,
            maximum_concurrent_rpcs=streams + 1000,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(frames.SERVICE, {frames.METHOD: handler}),)
        )
        if certificates is None:
            self.port: int = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(
                address, grpc.ssl_server_credentials([certificates])
            )
        self._server.start()

    def wait(self, is_over: Callable[[NodeLink], bool], seconds: float) -> bool:
        """Wait up to `seconds`; return True once `is_over` holds for every node.

        A node that is silent has failed.
        """
        with self._changed:
            is_over_for_all = self._changed.wait_for(
                lambda: all(map(is_over, self.links.values())), seconds
            )
        for link in self.links.values():
            link.fail_if_silent()
        return is_over_for_all

    def close(self) -> None:
        """End every stream, and stop listening.

        A node that is not done learns that the attempt is over.
        """
        with self._changed:
            self._awaited = {}
        for link in self.links.values():
            link.outgoing.put(None)
        self._server.stop(1).wait()

    def _admit(self, token: object) -> NodeLink | None:
        """Return the node that a token belongs to, once."""
        with self._changed:
            return self._awaited.pop(_digest(str(token)), None)

    def _serve(self, received: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Take a node's stream: its frames in a thread of their own, answers in this one."""
        link = self._admit(dict(context.invocation_metadata()).get(frames.TOKEN, ""))
        if link is None:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token is unknown, used, or of an earlier attempt",
            )
        assert link is not None
        if not context.add_callback(lambda: link.fail("its side channel broke")):
            link.fail("its side channel broke")
        # now the node knows that it is admitted
        context.send_initial_metadata(())
        link.connect()
        threading.Thread(target=_listen, args=(link, received), daemon=True).start()
        yield from frames.frames_to_send(link.outgoing)
        if not link.is_done:
            context.abort(grpc.StatusCode.ABORTED, link.failure or "the attempt is over")


def _listen(link: NodeLink, received: Iterator[bytes]) -> None:
    """Take all frames of a node."""
    try:
        for frame in received:
            link.hear(frame)
    except frames.FrameError as error:
        link.fail(str(error))
    except Exception:
        log(DEBUG, "A side channel ended", exc_info=True)
    link.fail("its side channel broke")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
