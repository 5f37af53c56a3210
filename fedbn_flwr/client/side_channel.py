"""A node's end of a side channel: an exchange that asks the server over one gRPC stream.

The server's end is `fedbn_flwr.server.side_channel`.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import grpc

from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.wire.frames import (
    METHOD,
    SERVICE,
    SILENCE,
    TOKEN,
    TRANSPORT_LIMIT,
    Alive,
    Done,
    Failed,
    Frame,
    NodeRequest,
    frames_to_send,
    pack_frame,
    read_frame,
)

#: where a site names the address by which it reaches the server's side channel, in place of the server's own, and the
#: certificates that it trusts: a file, `none` for a channel without TLS; without it, those that gRPC trusts
ADDRESS_VARIABLE, CERTIFICATES_VARIABLE = "FEDBN_FLWR_EXCHANGE_ADDRESS", "FEDBN_FLWR_EXCHANGE_CA"
#: seconds within which the server must be reached
PATIENCE = 10.0

_OPTIONS = [
    ("grpc.max_receive_message_length", TRANSPORT_LIMIT),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
]


class UnreachableError(RuntimeError):
    """The server's side channel cannot be reached, or does not admit the node."""


class AttemptOverError(RuntimeError):
    """The server has ended the attempt: another node failed."""


class SideChannelExchange:
    """An `Exchange` over a stream, which is open inside the block; UnreachableError if it cannot be opened.

    `introduce` is to return the node's partition and number of samples; it is called with every request.
    """

    def __init__(self, address: str, token: str) -> None:
        self.introduce: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming: SimpleQueue[Frame | Exception] = SimpleQueue()
        target = os.environ.get(ADDRESS_VARIABLE) or address
        self._channel = _open_channel(target, address)
        try:
            _await_ready(self._channel, target)
            stream = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
            self._call = stream(frames_to_send(self._outgoing), metadata=((TOKEN, token),))
            _await_admission(self._call, target)
        except BaseException:
            self._channel.close()
            raise
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __call__(self, request: Requests) -> Answer:
        """Send a request and wait for its answer."""
        self._outgoing.put(pack_frame(NodeRequest(request, *self.introduce())))
        while True:
            try:
                frame = self._incoming.get(timeout=SILENCE)
            except Empty:
                self._call.cancel()
                raise ConnectionError(f"the server's side channel was silent for {SILENCE:g} s") from None
            match frame:
                case Answer(tensor, count):
                    return Answer(tensor.to(request.tensor.device), count)
                case Exception():
                    raise frame
                case Alive():
                    continue
                case _:
                    raise ConnectionError(f"the server sent a frame of the type {type(frame).__name__}")

    def finish(self) -> None:
        """Tell the server that the step is taken; nothing is exchanged any more."""
        self._end(Done())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._end(Failed(f"{type(error).__name__}: {error}"))
        self._outgoing.put(None)
        # until the server has read all and closed the stream
        self._listener.join(PATIENCE)
        self._channel.close()

    def _end(self, frame: Frame) -> None:
        self._outgoing.put(pack_frame(frame))
        self._outgoing.put(None)

    def _listen(self) -> None:
        """Take all frames of the server."""
        try:
            for content in self._call:
                self._incoming.put(read_frame(content))
            self._incoming.put(ConnectionError("the server has ended the side channel"))
        except grpc.RpcError:
            code, details = self._call.code(), self._call.details()
            over = code == grpc.StatusCode.ABORTED
            self._incoming.put(AttemptOverError(details) if over else ConnectionError(f"{code.name}: {details}"))
        except ValueError as error:
            self._incoming.put(error)
            self._call.cancel()


def _open_channel(target: str, address: str) -> Any:
    trusted = os.environ.get(CERTIFICATES_VARIABLE, "")
    if trusted == "none":
        return grpc.insecure_channel(target, options=_OPTIONS)
    try:
        roots = Path(trusted).read_bytes() if trusted else None
    except OSError as error:
        raise UnreachableError(f"{CERTIFICATES_VARIABLE}={trusted!r} cannot be read: {error.strerror}") from error
    # whichever way the site takes, the certificate must be that of the server
    name = ("grpc.ssl_target_name_override", address.rpartition(":")[0].strip("[]"))
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(roots), options=[*_OPTIONS, name])


def _await_ready(channel: Any, target: str) -> None:
    try:
        grpc.channel_ready_future(channel).result(timeout=PATIENCE)
    except grpc.FutureTimeoutError:
        raise UnreachableError(f"{target} cannot be reached within {PATIENCE:g} s: {_why_not(channel)}") from None


def _why_not(channel: Any) -> str:
    """Return why a channel is not ready, from a call that fails."""
    try:
        channel.unary_unary(f"/{SERVICE}/{METHOD}")(b"", timeout=1)
    except grpc.RpcError as error:
        answer: Any = error
        return "no answer" if answer.code() == grpc.StatusCode.DEADLINE_EXCEEDED else str(answer.details())
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
        raise UnreachableError(f"{target} does not admit this node: {call.code().name}: {call.details()}")
