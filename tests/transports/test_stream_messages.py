"""Frames of a side channel: what is packed is read again, and whatever else is sent is refused."""

from queue import SimpleQueue
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.layerwise import Answer, Kind, Requests
from fedbn_flwr.transports import stream_messages
from fedbn_flwr.transports.stream_messages import (
    FRAME_LIMIT,
    METHOD,
    SERVICE,
    Alive,
    Done,
    Failed,
    Frame,
    FrameError,
    MaskedRequest,
    NodeRequest,
    frames_to_send,
    pack_frame,
    proto,
    read_frame,
)


def request(tensor: torch.Tensor, layer: str = "bn") -> NodeRequest:
    return NodeRequest(Requests.of_client("mean", layer, tensor, 3), 0, 7)


REQUEST = pack_frame(request(torch.tensor([0.5, -2.0])))


def changed(**fields: Any) -> bytes:
    """Return the bytes of a request with other fields, of its values too."""
    frame = proto.Frame.FromString(REQUEST)
    for name, value in fields.items():
        owner = frame.request.values if name in ("shape", "dtype", "numbers") else frame.request
        if name == "shape":
            del owner.shape[:]
            owner.shape.extend(value)
        else:
            setattr(owner, name, value)
    return frame.SerializeToString()  # type: ignore[no-any-return]


def test_the_generated_module_is_that_of_the_description() -> None:
    frame, service = proto.DESCRIPTOR.message_types_by_name["Frame"], proto.DESCRIPTOR.services_by_name["SideChannel"]
    assert (service.full_name, [method.name for method in service.methods]) == (SERVICE, [METHOD])
    assert [field.name for field in frame.fields] == ["request", "answer", "done", "failed", "alive", "masked"]


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
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**53),
    ),
    st.builds(Answer, tensors, counts),
    st.builds(Failed, st.text(st.characters(categories=["L", "N", "P"]), max_size=40)),
    st.just(Done()),
    st.just(Alive()),
)


def values_of(item: Frame) -> list[Any]:
    """Return everything that a frame says, its tensor apart."""
    match item:
        case NodeRequest(request, partition, num_examples):
            return [request.tensor, request.kind, request.layer, request.counts, partition, num_examples]
        case Answer(tensor, count):
            return [tensor, count]
        case Failed(reason):
            return [None, reason]
    return [None]


@given(frames)
def test_what_is_packed_is_read_again(sent: Frame) -> None:
    read = read_frame(pack_frame(sent))
    assert type(read) is type(sent)
    (before, *said), (after, *heard) = values_of(sent), values_of(read)
    assert said == heard
    if before is not None:
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


sizes = st.integers(0, 2**64 - 1)
fields = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.text(max_size=9),
        "layer": st.text(max_size=9),
        "count": sizes,
        "partition": sizes,
        "num_examples": sizes,
        "shape": st.lists(st.integers(0, 2**32 - 1), max_size=4),
        "dtype": st.sampled_from(["<f4", "<f8", "|O", ">f4", ""]),
        "numbers": st.binary(max_size=24),
    },
)


@given(fields)
def test_a_request_with_any_fields_is_read_or_refused(said: dict[str, Any]) -> None:
    read_or_refused(changed(**said))


@given(frames, st.data())
def test_a_frame_with_changed_bytes_is_read_or_refused(sent: Frame, data: st.DataObject) -> None:
    content = bytearray(pack_frame(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(content[: data.draw(st.integers(0, len(content)))]))


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no content that is known"),
    "no message": (b"\xff\xff", "cannot be read"),
    "half a message": (REQUEST[:-1], "cannot be read"),
    "another kind": (changed(kind="median"), "'median' of layer 'bn'"),
    "a long name": (changed(layer="x" * 3000), "'mean' of layer 'xxx"),
    "a huge count": (changed(count=2**41), "count is 2199023255552"),
    "more samples than there are": (changed(num_examples=2**60), "num_examples is"),
    "fewer numbers than said": (changed(numbers=bytes(7)), r"7 bytes are not the shape \[2\]"),
    "more numbers than said": (changed(numbers=bytes(9)), r"9 bytes are not the shape \[2\]"),
    "a shape that fills the memory": (changed(shape=[2**31, 2**31]), "8 bytes are not the shape"),
    "three dimensions": (changed(shape=[2, 1, 1]), "in 3 dimensions"),
    "objects": (changed(dtype="|O"), r"numbers of '\|O'"),
    "more than a frame": (changed(numbers=bytes(FRAME_LIMIT)), "at most 2105344 are allowed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    content, reason = WRONG[case]
    with pytest.raises(FrameError, match=reason):
        read_frame(content)


def test_a_reason_cannot_write_lines_into_a_log() -> None:
    content = pack_frame(Failed("no\nNode 7 is fine\x1b[2J \ud800"))
    assert read_frame(content) == Failed("no Node 7 is fine [2J ?")


def test_what_is_too_large_is_not_packed() -> None:
    pack_frame(request(torch.zeros(2, 2**16, dtype=torch.float64)))
    for much in (request(torch.zeros(5, 2**16, dtype=torch.float64)), request(torch.zeros(2), "x" * 3000)):
        with pytest.raises(FrameError, match="too large"):
            pack_frame(much)


def test_numbers_of_another_type_are_not_packed() -> None:
    with pytest.raises(FrameError, match="int64 cannot be exchanged"):
        pack_frame(request(torch.zeros(2, dtype=torch.int64)))


def test_an_end_that_has_nothing_to_say_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_messages, "BEAT", 0.01)
    queue: SimpleQueue[bytes | None] = SimpleQueue()
    sent = frames_to_send(queue)
    assert isinstance(read_frame(next(sent)), Alive)
    queue.put(b"frame")
    queue.put(None)
    said = list(sent)
    assert said[-1] == b"frame"
    assert all(isinstance(read_frame(frame), Alive) for frame in said[:-1])


def test_a_masked_request_is_read_as_it_was_packed() -> None:
    hidden = np.arange(6, dtype=np.uint64).reshape(2, 3)
    read = read_frame(pack_frame(MaskedRequest("form", -1, hidden)))
    assert isinstance(read, MaskedRequest)
    assert (read.form, read.partition) == ("form", -1)
    assert (read.hidden == hidden).all()
    with pytest.raises(FrameError, match="too large"):
        pack_frame(MaskedRequest("x" * 5000, 0, hidden))


@pytest.mark.parametrize("fields", [{"hidden": bytes(17)}, {"form": "x" * 5000}])
def test_a_masked_request_that_cannot_be_is_refused(fields: Any) -> None:
    with pytest.raises(FrameError, match="bytes under masks, of a form of"):
        read_frame(proto.Frame(masked=proto.MaskedRequest(**fields)).SerializeToString())
