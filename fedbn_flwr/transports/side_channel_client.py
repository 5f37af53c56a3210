"""The nodes' end of a side channel: the messages of a layer-wise step come, and requests go, over
one gRPC stream.

The server's end is in `side_channel_grid.py`, the frames of both in `side_channel_frames.py`.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import grpc
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.transports import side_channel_frames as frames
from fedbn_flwr.transports.message_client import holds_step
from fedbn_flwr.transports.message_records import ADDRESS, SIDE_CHANNEL, TOKEN, UNREACHABLE
from fedbn_flwr.wire.packed import with_content

#: where a site names the address by which it reaches the server's side channel, in place of the
#: server's own, and the certificates that it trusts: a file, `none` for a channel without TLS;
#: without it, those that gRPC trusts
SITE_ADDRESS_VARIABLE = "FEDBN_FLWR_EXCHANGE_ADDRESS"
CERTIFICATES_VARIABLE = "FEDBN_FLWR_EXCHANGE_CA"
#: seconds within which the server must be reached
PATIENCE = 10.0

_OPTIONS = [
    ("grpc.max_receive_message_length", frames.TRANSPORT_LIMIT),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
]


class UnreachableError(RuntimeError):
    """The server's side channel cannot be reached, or does not admit the node."""


class AttemptOverError(RuntimeError):
    """The server has ended the attempt: another node failed."""


def answer_by_channel(
    message: Message, context: Context, answer: Callable[[Message, Context], Message]
) -> Message:
    """Answer the message that begins a layer-wise step, and over a side channel all others, as if
    they were messages.

    The reply is the one that ends the step. Without a channel, the reply says so.
    """
    record: Any = message.content[SIDE_CHANNEL]
    content = RecordDict(
        {name: each for name, each in message.content.items() if name != SIDE_CHANNEL}
    )
    report: dict[str, Any] = {}
    try:
        with NodeStream(record[ADDRESS], record[TOKEN]) as stream:
            reply = answer(with_content(message, content), context)
            while holds_step(context) and reply.has_content():
                reply = answer(with_content(message, stream.ask(reply.content)), context)
            stream.end((reply.error.reason or "it failed") if reply.has_error() else "")
            return reply
    except UnreachableError as error:
        report[UNREACHABLE] = str(error)
    except AttemptOverError:
        pass  # the step ends with the first message of the next attempt
    return Message(RecordDict({wire.REPORT: ConfigRecord(report)}), reply_to=message)


class NodeStream:
    """A stream to the server's side channel, which is open inside the block; UnreachableError if it
    cannot be.
    """

    def __init__(self, address: str, token: str) -> None:
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming: SimpleQueue[bytes | Exception] = SimpleQueue()
        target = os.environ.get(SITE_ADDRESS_VARIABLE) or address
        self._connection = _connect(target, address)
        try:
            _await_ready(self._connection, target)
            stream = self._connection.stream_stream(f"/{frames.SERVICE}/{frames.METHOD}")
            self._call = stream(
                frames.frames_to_send(self._outgoing), metadata=((frames.TOKEN, token),)
            )
            _await_admission(self._call, target)
        except BaseException:
            self._connection.close()
            raise
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, reply: RecordDict) -> RecordDict:
        """Send the content of a reply, and wait for that of the next message."""
        self._outgoing.put(frames.pack_frame(reply))
        while True:
            try:
                frame = self._incoming.get(timeout=frames.SILENCE)
            except Empty:
                self._call.cancel()
                raise ConnectionError(
                    f"the server's side channel was silent for {frames.SILENCE:g} s"
                ) from None
            if isinstance(frame, Exception):
                raise frame
            if frame != frames.ALIVE:
                return frames.read_frame(frame)

    def end(self, reason: str = "") -> None:
        """Send no more replies: the last one comes by Flower, or the node failed for a reason."""
        self._outgoing.put(frames.last_frame(reason))
        self._outgoing.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.end(f"{type(error).__name__}: {error}")
        # until the server has read all and closed the stream
        self._listener.join(PATIENCE)
        self._connection.close()

    def _listen(self) -> None:
        """Take all frames of the server."""
        try:
            for frame in self._call:
                self._incoming.put(frame)
            self._incoming.put(ConnectionError("the server has ended the side channel"))
        except grpc.RpcError:
            code = self._call.code()
            details = self._call.details()
            over = code == grpc.StatusCode.ABORTED
            self._incoming.put(
                AttemptOverError(details) if over else ConnectionError(f"{code.name}: {details}")
            )


def _connect(target: str, address: str) -> Any:
    trusted = os.environ.get(CERTIFICATES_VARIABLE, "")
    if trusted == "none":
        return grpc.insecure_channel(target, options=_OPTIONS)
    try:
        roots = None
        if trusted:
            roots = Path(trusted).read_bytes()
    except OSError as error:
        raise UnreachableError(
            f"{CERTIFICATES_VARIABLE}={trusted!r} cannot be read: {error.strerror}"
        ) from error
    # whichever way the site takes, the certificate must be that of the server
    name = ("grpc.ssl_target_name_override", address.rpartition(":")[0].strip("[]"))
    return grpc.secure_channel(
        target, grpc.ssl_channel_credentials(roots), options=[*_OPTIONS, name]
    )


def _await_ready(connection: Any, target: str) -> None:
    try:
        grpc.channel_ready_future(connection).result(timeout=PATIENCE)
    except grpc.FutureTimeoutError:
        raise UnreachableError(
            f"{target} cannot be reached within {PATIENCE:g} s: {_why_not(connection)}"
        ) from None


def _why_not(connection: Any) -> str:
    """Return why a connection is not ready, from a call that fails."""
    try:
        connection.unary_unary(f"/{frames.SERVICE}/{frames.METHOD}")(b"", timeout=1)
    except grpc.RpcError as error:
        answer: Any = error
        if answer.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer"
        return str(answer.details())
    return "it is something else"


def _await_admission(call: Any, target: str) -> None:
    """Wait for the server's first sign, which it gives to nodes that it admits."""
    timer = threading.Timer(PATIENCE, call.cancel)
    timer.start()
    try:
        # returns at the end of the call, too
        call.initial_metadata()
    finally:
        timer.cancel()
    if not call.is_active():
        raise UnreachableError(
            f"{target} does not admit this node: {call.code().name}: {call.details()}"
        )
