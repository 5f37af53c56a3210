"""The nodes' end of a layer-wise step over a side channel: an exchange that asks the server over one gRPC stream.

The server's end is in `stream_server.py`, what both say to each other in `side_channel.proto`.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from flwr.app import Context, RecordDict

from fedbn_flwr import state, wire
from fedbn_flwr.client.gate_memory import other_batches
from fedbn_flwr.client.reply import Reply
from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.layerwise import Answer, OwnRandomness, Requests
from fedbn_flwr.state.records import array_records
from fedbn_flwr.transports.message_client import ClientFunction, LayerwiseClient, train
from fedbn_flwr.transports.message_records import ADDRESS, OVER, SIDE_CHANNEL, UNREACHABLE, pack_request
from fedbn_flwr.transports.message_records import TOKEN as TOKEN_KEY
from fedbn_flwr.transports.stream_messages import (
    METHOD,
    SERVICE,
    SILENCE,
    TOKEN,
    TRANSPORT_LIMIT,
    Alive,
    Done,
    Failed,
    Frame,
    MaskedRequest,
    NodeRequest,
    frames_to_send,
    pack_frame,
    read_frame,
)
from fedbn_flwr.wire import Instruction, masked

if TYPE_CHECKING:
    from fedbn_flwr.client.gate import Sum

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


def step_over_stream(content: RecordDict, context: Context, make_client: ClientFunction) -> Reply:
    """Take the whole step, and all other steps of the round, while a side channel is open for the exchanges.

    Without a channel, or if the attempt is over, the reply says so.
    """
    config: Any = content[wire.CONFIG]
    record: Any = content[SIDE_CHANNEL]
    masks = _masks_of(content, context) if masked.SECURE in content else None
    try:
        with StreamExchange(record[ADDRESS], record[TOKEN_KEY], masks) as exchange:
            client, instruction = make_client(context), read_instruction(config)
            instruction = other_batches(client, instruction, content, context)
            exchange.introduce = partial(_introduction, client, instruction)
            with OwnRandomness(client.step_seed(instruction)).drawing():
                received = {name: state.from_record(arrays) for name, arrays in array_records(content).items()}
                return train(client, received, instruction, exchange)
    except UnreachableError as error:
        return Reply(0, {}, report={UNREACHABLE: str(error)})
    except AttemptOverError:
        return Reply(0, {}, report={OVER: True})


def _introduction(client: LayerwiseClient, instruction: Instruction) -> tuple[int, int]:
    """Return the node's partition, and how many samples are behind it."""
    return client.partition_id, client.reply({}, instruction, {}).num_examples or 0


def _masks_of(content: RecordDict, context: Context) -> "Sum":
    # cryptography takes a while to import
    from fedbn_flwr.client.gate import Sum

    return Sum(content, context)


class StreamExchange:
    """An `Exchange` over a stream, which is open inside the block; UnreachableError if it cannot be opened.

    `introduce` is to return the node's partition and number of samples; it is called with every request.
    """

    def __init__(self, address: str, token: str, masks: "Sum | None" = None) -> None:
        self._masks = masks
        self.introduce: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming: SimpleQueue[Frame | Exception] = SimpleQueue()
        target = os.environ.get(ADDRESS_VARIABLE) or address
        self._connection = _connect(target, address)
        try:
            _await_ready(self._connection, target)
            stream = self._connection.stream_stream(f"/{SERVICE}/{METHOD}")
            self._call = stream(frames_to_send(self._outgoing), metadata=((TOKEN, token),))
            _await_admission(self._call, target)
        except BaseException:
            self._connection.close()
            raise
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __call__(self, request: Requests) -> Answer:
        """Send a request and wait for its answer."""
        self._outgoing.put(pack_frame(self._framed(request)))
        while True:
            try:
                frame = self._incoming.get(timeout=SILENCE)
            except Empty:
                self._call.cancel()
                raise ConnectionError(f"the server's side channel was silent for {SILENCE:g} s") from None
            match frame:
                case Answer(tensor, count):
                    if self._masks:
                        self._masks.hear(repr((tensor.tolist(), count)).encode())
                    return Answer(tensor.to(request.tensor.device), count)
                case Exception():
                    raise frame
                case Alive():
                    continue
                case _:
                    raise ConnectionError(f"the server sent a frame of the type {type(frame).__name__}")

    def _framed(self, request: Requests) -> NodeRequest | MaskedRequest:
        """Return what leaves the node for a request."""
        partition, num_examples = self.introduce()
        if self._masks is None:
            return NodeRequest(request, partition, num_examples)
        form, hidden = self._masks.hide_request(pack_request(request, num_examples))
        return MaskedRequest(form.pack(), partition, hidden)

    def finish(self) -> None:
        """Tell the server that the step is taken; nothing is exchanged any more."""
        self._end(Done())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # under masks, the text stays at the site, which logs it
            text = "" if self._masks else f": {error}"
            self._end(Failed(f"{type(error).__name__}{text}"))
        self._outgoing.put(None)
        # until the server has read all and closed the stream
        self._listener.join(PATIENCE)
        self._connection.close()

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


def _connect(target: str, address: str) -> Any:
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


def _await_ready(connection: Any, target: str) -> None:
    try:
        grpc.channel_ready_future(connection).result(timeout=PATIENCE)
    except grpc.FutureTimeoutError:
        raise UnreachableError(f"{target} cannot be reached within {PATIENCE:g} s: {_why_not(connection)}") from None


def _why_not(connection: Any) -> str:
    """Return why a connection is not ready, from a call that fails."""
    try:
        connection.unary_unary(f"/{SERVICE}/{METHOD}")(b"", timeout=1)
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
