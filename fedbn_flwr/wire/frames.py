"""The frames of a side channel: what a node and the server say to each other while a layer-wise step lasts.

A frame is the length of its head (4 bytes, network order), the head, a JSON object, and behind it the raw numbers of at
most one tensor, in C order and little-endian. The head's `type` is

- `request`, from a node: `kind`, `layer` and `count` of its request, `partition` and `num-examples` of the node,
- `answer`, from the server: `count`,
- `done`, from a node: it has taken the step; nothing but its model is to come, as Flower's reply,
- `failed`, from a node: the `reason` for which it cannot take the step,
- `alive`, from both, whenever nothing else was said for `BEAT` seconds.

Requests and answers have the `shape` and `dtype` of their tensor. Nothing that is received is ever executed, and no
length in it is believed: a frame that is not exactly what its head says is a FrameError.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.layerwise import Answer, Kind, Requests

#: the gRPC method that takes a stream of a node's frames, and answers with a stream of the server's
SERVICE, METHOD = "fedbn.SideChannel", "Exchange"
#: in the metadata of a node's stream
TOKEN = "token"
#: bytes of a head, and of a frame: no BN layer has more than 65,536 channels, of two numbers of 8 bytes each
HEAD_LIMIT, FRAME_LIMIT = 4096, 2**20 + 2**13
#: what gRPC lets through, so that a frame that is too large can be named, and not only refused
TRANSPORT_LIMIT = 4 * FRAME_LIMIT
#: seconds after which an end that has nothing to say says that it is there, and after which the other end is given up
BEAT, SILENCE = 3.0, 15.0

_DTYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.float16: "<f2"}
#: values behind a request, so that the answer's count stays below what a float64 holds exactly; samples of a node; and
#: a node without a partition is told by its number
_MOST_VALUES, _MOST_EXAMPLES, _MOST_PARTITION = 2**40, 2**53, 2**64
#: characters of a reason
_LONGEST_REASON = 500


class FrameError(ValueError):
    """A frame that cannot be read, or is too large."""


@dataclass(frozen=True)
class NodeRequest:
    """A node's request, and what its weight depends on."""

    request: Requests
    partition: int
    num_examples: int


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


Frame = NodeRequest | Answer | Done | Failed | Alive


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
    match frame:
        case NodeRequest(request, partition, num_examples):
            place = {"kind": request.kind, "layer": request.layer, "count": request.counts[0]}
            head: dict[str, Any] = {"type": "request", **place, "partition": partition, "num-examples": num_examples}
            return _pack(head, request.tensor[0])
        case Answer(tensor, count):
            return _pack({"type": "answer", "count": count}, tensor)
        case Failed(reason):
            return _pack({"type": "failed", "reason": reason[:_LONGEST_REASON]})
        case _:
            return _pack({"type": type(frame).__name__.lower()})


def read_frame(content: bytes) -> Frame:
    """Return the frame that these bytes are; FrameError if they are none."""
    if len(content) > FRAME_LIMIT:
        raise FrameError(f"it sent a frame of {len(content)} bytes; at most {FRAME_LIMIT} are allowed")
    try:
        (length,) = struct.unpack_from("!I", content)
        if length > min(HEAD_LIMIT, len(content) - 4):
            raise ValueError(f"a head of {length} bytes")
        head = json.loads(content[4 : 4 + length])
        return _read(head, content[4 + length :])
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise FrameError(f"it sent a frame that cannot be read: {type(error).__name__}: {str(error)[:200]}") from None


def _pack(head: dict[str, Any], tensor: Tensor | None = None) -> bytes:
    body = b""
    if tensor is not None:
        if tensor.dtype not in _DTYPES:
            raise FrameError(f"numbers of {tensor.dtype} cannot be exchanged")
        # one transfer from a GPU
        body = tensor.detach().cpu().contiguous().numpy().tobytes()
        head = {**head, "shape": list(tensor.shape), "dtype": _DTYPES[tensor.dtype]}
    text = json.dumps(head).encode()
    if len(text) > HEAD_LIMIT or 4 + len(text) + len(body) > FRAME_LIMIT:
        size = 4 + len(text) + len(body)
        raise FrameError(f"a frame of {size} bytes is too large; at most {FRAME_LIMIT} are allowed")
    return struct.pack("!I", len(text)) + text + body


def _read(head: Any, body: bytes) -> Frame:
    if not isinstance(head, dict):
        raise ValueError("the head is no object")
    match head["type"]:
        case "request":
            kind, layer = head["kind"], head["layer"]
            if kind not in get_args(Kind) or not isinstance(layer, str):
                raise ValueError(f"{kind!r} of layer {layer!r}")
            request = Requests.of_client(kind, layer, _tensor(head, body), _whole(head, "count", _MOST_VALUES))
            examples = _whole(head, "num-examples", _MOST_EXAMPLES)
            return NodeRequest(request, _whole(head, "partition", _MOST_PARTITION), examples)
        case "answer":
            return Answer(_tensor(head, body), _whole(head, "count", _MOST_EXAMPLES))
    if body:
        raise ValueError(f"{len(body)} bytes behind a head without a tensor")
    match head["type"]:
        case "failed":
            # it goes into logs
            return Failed("".join(sign if sign.isprintable() else " " for sign in str(head["reason"])))
        case "done":
            return Done()
        case "alive":
            return Alive()
        case other:
            raise ValueError(f"type {other!r}")


def _whole(head: dict[str, Any], key: str, most: int) -> int:
    """Return a whole number between 0 and the most."""
    value = head[key]
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{key} is {value!r}")
    return value


def _tensor(head: dict[str, Any], body: bytes) -> Tensor:
    shape, dtype = head["shape"], head["dtype"]
    if dtype not in _DTYPES.values() or not isinstance(shape, list) or len(shape) > 2:
        raise ValueError(f"numbers of {dtype!r} in the shape {shape!r}")
    if not all(type(size) is int and 0 <= size <= FRAME_LIMIT for size in shape):
        raise ValueError(f"the shape {shape!r}")
    if prod(shape) * np.dtype(dtype).itemsize != len(body):
        raise ValueError(f"{len(body)} bytes are not the shape {shape} of {dtype}")
    # a copy: torch takes no memory that it may not write
    return torch.from_numpy(np.frombuffer(body, dtype).reshape(shape).copy())
