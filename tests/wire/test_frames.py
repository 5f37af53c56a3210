"""Frames of a side channel: what is packed is read again, and whatever else is sent is refused."""

import json
import struct
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.layerwise import Answer, Kind, Requests
from fedbn_flwr.wire.frames import (
    FRAME_LIMIT,
    HEAD_LIMIT,
    Alive,
    Done,
    Failed,
    Frame,
    FrameError,
    NodeRequest,
    frames_to_send,
    pack_frame,
    read_frame,
)

NAMED: Mapping[str, Any] = {"type": "request", "kind": "mean", "layer": "bn", "count": 3, "partition": 0}
NAMED = {**NAMED, "num-examples": 7, "shape": [2], "dtype": "<f4"}
BODY = struct.pack("<ff", 0.5, -2.0)


def frame(head: object, body: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("!I", len(text)) + text + body


def request(tensor: torch.Tensor, layer: str = "bn") -> NodeRequest:
    return NodeRequest(Requests.of_client("mean", layer, tensor, 3), 0, 7)


def test_the_bytes_of_a_request() -> None:
    read = read_frame(frame(NAMED, BODY))
    assert isinstance(read, NodeRequest)
    assert read.request.tensor.tolist() == [[0.5, -2.0]]
    assert (read.request.kind, read.request.layer, read.request.counts) == ("mean", "bn", (3,))
    assert (read.partition, read.num_examples) == (0, 7)
    assert pack_frame(read) == frame(
        {key: NAMED[key] for key in ("type", "kind", "layer", "count", "partition", "num-examples", "shape", "dtype")},
        BODY,
    )


tensors = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 9), max_size=2),
    st.sampled_from([torch.float16, torch.float32, torch.float64]),
    st.integers(0, 99),
)
counts = st.integers(0, 2**40)
frames = st.one_of(
    st.builds(
        NodeRequest,
        st.builds(Requests.of_client, st.sampled_from(get_args(Kind)), st.text(max_size=40), tensors, counts),
        st.integers(0, 2**64),
        st.integers(0, 2**53),
    ),
    st.builds(Answer, tensors, counts),
    st.builds(Failed, st.text(st.characters(categories=["L", "N", "P"]), max_size=40)),
    st.just(Done()),
    st.just(Alive()),
)


def tensor_of(item: Frame) -> torch.Tensor | None:
    match item:
        case NodeRequest(request):
            return request.tensor
        case Answer(tensor):
            return tensor
    return None


@given(frames)
def test_what_is_packed_is_read_again(sent: Frame) -> None:
    read = read_frame(pack_frame(sent))
    assert type(read) is type(sent)
    assert pack_frame(read) == pack_frame(sent)
    before, after = tensor_of(sent), tensor_of(read)
    if before is not None:
        assert after is not None
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)


def read_or_refused(content: bytes) -> None:
    """A frame, or a FrameError of one short line; any other exception fails the test."""
    said = ""
    try:
        read_frame(content)
    except FrameError as error:
        said = str(error)
    assert len(said) < 400


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    read_or_refused(content)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*NAMED, "reason"]), values), st.binary(max_size=24), st.booleans())
def test_any_head_and_body_are_read_or_refused(head: dict[str, Any], body: bytes, is_complete: bool) -> None:
    read_or_refused(frame({**NAMED, **head} if is_complete else head, body))


@given(frames, st.data())
def test_a_frame_with_changed_bytes_is_read_or_refused(sent: Frame, data: st.DataObject) -> None:
    content = bytearray(pack_frame(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(content[: data.draw(st.integers(0, len(content)))]))


WRONG: dict[str, bytes] = {
    "nothing": b"",
    "a head that is longer than the frame": struct.pack("!I", 100) + b"{}",
    "a head that is too long": struct.pack("!I", HEAD_LIMIT + 1) + b" " * (HEAD_LIMIT + 1),
    "a head without an end": struct.pack("!I", HEAD_LIMIT) + b"[" * HEAD_LIMIT,
    "another encoding": struct.pack("!I", 4) + b"\xff\xfe\xfd\xfc",
    "a list": frame([]),
    "no type": frame({}),
    "another type": frame({"type": "pickle"}),
    "an end with numbers": frame({"type": "done"}, BODY),
    "another kind": frame({**NAMED, "kind": "median"}, BODY),
    "a layer that is no name": frame({**NAMED, "layer": 3}, BODY),
    "a negative count": frame({**NAMED, "count": -1}, BODY),
    "a huge count": frame({**NAMED, "count": 10**30}, BODY),
    "a count that is true": frame({**NAMED, "count": True}, BODY),
    "half a partition": frame({**NAMED, "partition": 0.5}, BODY),
    "fewer numbers than said": frame(NAMED, BODY[:-1]),
    "more numbers than said": frame(NAMED, BODY + b"\0"),
    "a shape of negative sizes": frame({**NAMED, "shape": [-1, -2]}, BODY),
    "a shape that fills the memory": frame({**NAMED, "shape": [2**31, 2**31]}, BODY),
    "three dimensions": frame({**NAMED, "shape": [2, 1, 1]}, BODY),
    "objects": frame({**NAMED, "dtype": "|O"}, BODY),
    "more than a frame": frame(NAMED, bytes(FRAME_LIMIT)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    with pytest.raises(FrameError):
        read_frame(WRONG[case])


def test_a_reason_cannot_write_lines_into_a_log() -> None:
    assert read_frame(frame({"type": "failed", "reason": "no\nNode 7 is fine\x1b[2J"})) == Failed(
        "no Node 7 is fine [2J"
    )


def test_what_is_too_large_is_not_packed() -> None:
    pack_frame(request(torch.zeros(2, 2**16, dtype=torch.float64)))
    for much in (request(torch.zeros(3, 2**16, dtype=torch.float64)), request(torch.zeros(2), "x" * HEAD_LIMIT)):
        with pytest.raises(FrameError, match="too large"):
            pack_frame(much)


def test_numbers_of_another_type_are_not_packed() -> None:
    with pytest.raises(FrameError, match="int64 cannot be exchanged"):
        pack_frame(request(torch.zeros(2, dtype=torch.int64)))


def test_an_end_that_has_nothing_to_say_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.wire.frames.BEAT", 0.01)
    queue: SimpleQueue[bytes | None] = SimpleQueue()
    sent = frames_to_send(queue)
    assert isinstance(read_frame(next(sent)), Alive)
    queue.put(b"frame")
    queue.put(None)
    said = list(sent)
    assert said[-1] == b"frame"
    assert all(isinstance(read_frame(frame), Alive) for frame in said[:-1])
