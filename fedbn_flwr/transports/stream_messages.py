"""The frames of a side channel, packed and read: `side_channel.proto` says what they hold.

Nothing that is received is believed. Protobuf makes sure that fields have their types; everything else is looked at
here, before memory is taken for it: a frame whose size, shape or numbers cannot be is a FrameError that says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, get_args

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from fedbn_flwr.layerwise import Answer, Kind, Requests
from fedbn_flwr.layerwise.exchange import MOST
from fedbn_flwr.secure.fixed_point import Limbs
from fedbn_flwr.transports import side_channel_pb2

#: its classes are made when it is imported
proto: Any = side_channel_pb2

#: the gRPC method that takes a stream of a node's frames, and answers with a stream of the server's
SERVICE, METHOD = "fedbn.SideChannel", "Exchange"
#: in the metadata of a node's stream
TOKEN = "token"
#: bytes of a frame: no BN layer has more than 65,536 channels, of two numbers of 8 bytes each, or of 16 under masks
FRAME_LIMIT = 2**21 + 2**13
#: what gRPC lets through, so that a frame that is too large can be named, and not only refused
TRANSPORT_LIMIT = 4 * FRAME_LIMIT
#: seconds after which an end that has nothing to say says that it is there, and after which the other end is given up
BEAT, SILENCE = 3.0, 15.0

_DTYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.float16: "<f2"}
#: values behind a request, so that the answer's count stays below what a float64 holds exactly; samples of a node
_MOST_VALUES, _MOST_EXAMPLES = 2**40, MOST
#: characters of a layer's name, and of a reason
_LONGEST_NAME, _LONGEST_REASON = 2000, 500
#: characters of the form of a masked request, in which there is a layer's name
_LONGEST_FORM = 2 * _LONGEST_NAME


class FrameError(ValueError):
    """A frame that cannot be read, or is too large."""


@dataclass(frozen=True)
class NodeRequest:
    """A node's request, and what its weight depends on."""

    #: of one client
    request: Requests
    partition: int
    num_examples: int


@dataclass(frozen=True)
class MaskedRequest:
    """A node's request under masks."""

    form: str
    partition: int
    #: (2, n)
    hidden: Limbs


@dataclass(frozen=True)
class Done:
    """A node has taken the step."""


@dataclass(frozen=True)
class Failed:
    """A node cannot take the step."""

    reason: str


@dataclass(frozen=True)
class Alive:
    """The other end is there."""


Frame = NodeRequest | MaskedRequest | Answer | Done | Failed | Alive


def frames_to_send(outgoing: "SimpleQueue[bytes | None]") -> Iterator[bytes]:
    """Iterate over the frames of a queue until there is None, with `alive` wherever none comes for a while."""
    while True:
        try:
            frame = outgoing.get(timeout=BEAT)
        except Empty:
            frame = pack_frame(Alive())
        if frame is None:
            return
        yield frame


def pack_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame; FrameError if they would be too many."""
    content: bytes = _message(frame).SerializeToString()
    if len(content) > FRAME_LIMIT:
        raise FrameError(f"a frame of {len(content)} bytes is too large; at most {FRAME_LIMIT} are allowed")
    return content


def read_frame(content: bytes) -> Frame:
    """Return the frame that these bytes are; FrameError if they are none."""
    if len(content) > FRAME_LIMIT:
        raise FrameError(f"it sent a frame of {len(content)} bytes; at most {FRAME_LIMIT} are allowed")
    try:
        return _read(proto.Frame.FromString(content))
    except (DecodeError, ValueError) as error:
        raise FrameError(f"it sent a frame that cannot be read: {str(error)[:200]}") from None


def _message(frame: Frame) -> Any:
    match frame:
        case NodeRequest(request, partition, num_examples):
            if len(request.layer) > _LONGEST_NAME:
                raise FrameError(f"the name of a BN layer is too large: {len(request.layer)} characters")
            request_message = proto.Request(
                kind=request.kind,
                layer=request.layer,
                count=request.counts[0],
                partition=partition,
                num_examples=num_examples,
                values=_pack_values(request.tensor[0]),
            )
            return proto.Frame(request=request_message)
        case MaskedRequest(form, partition, hidden):
            if len(form) > _LONGEST_FORM:
                raise FrameError(f"the name of a BN layer is too large: {len(form)} characters")
            return proto.Frame(masked=proto.MaskedRequest(form=form, partition=partition, hidden=hidden.tobytes()))
        case Answer(tensor, count):
            return proto.Frame(answer=proto.Answer(count=count, values=_pack_values(tensor)))
        case Failed(reason):
            text = reason[:_LONGEST_REASON].encode(errors="replace").decode()
            return proto.Frame(failed=proto.Failed(reason=text))
        case Done():
            return proto.Frame(done=proto.Done())
        case Alive():
            return proto.Frame(alive=proto.Alive())


def _read(message: Any) -> Frame:
    match message.WhichOneof("content"):
        case "request":
            return _read_request(message.request)
        case "masked":
            return _read_masked(message.masked)
        case "answer":
            return Answer(_read_values(message.answer.values), _at_most(_MOST_EXAMPLES, "count", message.answer.count))
        case "failed":
            # it goes into logs
            reason = message.failed.reason[:_LONGEST_REASON]
            return Failed("".join(sign if sign.isprintable() else " " for sign in reason))
        case "done":
            return Done()
        case "alive":
            return Alive()
        case _:
            raise ValueError("it has no content that is known")


def _read_request(request: Any) -> NodeRequest:
    if request.kind not in get_args(Kind) or len(request.layer) > _LONGEST_NAME:
        raise ValueError(f"{request.kind[:40]!r} of layer {request.layer[:80]!r}")
    count = _at_most(_MOST_VALUES, "count", request.count)
    requests = Requests.of_client(request.kind, request.layer, _read_values(request.values), count)
    num_examples = _at_most(_MOST_EXAMPLES, "num_examples", request.num_examples)
    return NodeRequest(requests, request.partition, num_examples)


def _read_masked(request: Any) -> MaskedRequest:
    if len(request.form) > _LONGEST_FORM or len(request.hidden) % 16:
        raise ValueError(f"{len(request.hidden)} bytes under masks, of a form of {len(request.form)} characters")
    hidden = np.frombuffer(request.hidden, "<u8").reshape(2, -1)
    return MaskedRequest(request.form, request.partition, hidden)


def _at_most(most: int, name: str, value: int) -> int:
    if value > most:
        raise ValueError(f"{name} is {value}")
    return value


def _pack_values(tensor: Tensor) -> Any:
    if tensor.dtype not in _DTYPES:
        raise FrameError(f"numbers of {tensor.dtype} cannot be exchanged")
    # one transfer from a GPU
    numbers = tensor.detach().cpu().contiguous().numpy().tobytes()
    return proto.Values(shape=tensor.shape, dtype=_DTYPES[tensor.dtype], numbers=numbers)


def _read_values(values: Any) -> Tensor:
    if values.dtype not in _DTYPES.values() or len(values.shape) > 2:
        raise ValueError(f"numbers of {values.dtype[:20]!r} in {len(values.shape)} dimensions")
    shape = list(values.shape)
    if prod(shape) * np.dtype(values.dtype).itemsize != len(values.numbers):
        raise ValueError(f"{len(values.numbers)} bytes are not the shape {shape} of {values.dtype}")
    # a copy: torch takes no memory that it may not write
    return torch.from_numpy(np.frombuffer(values.numbers, values.dtype).reshape(shape).copy())
