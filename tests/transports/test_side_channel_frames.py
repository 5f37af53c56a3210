"""Frames of a side channel: what is packed is read again, and whatever else is sent is refused."""

from queue import SimpleQueue

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Answer
from fedbn_flwr.state import to_record
from fedbn_flwr.transports import side_channel_frames
from fedbn_flwr.transports.message_records import REQUEST as REQUEST_RECORD
from fedbn_flwr.transports.message_records import pack_answers, read_answers, read_request
from fedbn_flwr.transports.side_channel_frames import (
    ALIVE,
    END,
    FRAME_LIMIT,
    FrameError,
    frames_to_send,
    last_frame,
    pack_frame,
    read_frame,
)


def request(tensor: torch.Tensor, layer: str = "bn") -> RecordDict:
    report = ConfigRecord({"kind": "mean", "count": 3})
    return RecordDict({REQUEST_RECORD: to_record({layer: tensor}), wire.REPORT: report})


REQUEST = pack_frame(request(torch.tensor([0.5, -2.0])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_is_packed_is_read_again(dtype: torch.dtype) -> None:
    values = torch.randn((2, 9)).to(dtype)
    asked = read_request(read_frame(pack_frame(request(values))))
    assert (asked.kind, asked.layer, asked.counts) == ("mean", "bn", (3,))
    assert asked.tensor[0].dtype == dtype
    assert torch.equal(asked.tensor[0], values)
    answers = read_answers(
        read_frame(pack_frame(RecordDict(dict(pack_answers({"0": Answer(values, 7)})))))
    )
    assert answers["0"].count == 7
    assert torch.equal(answers["0"].tensor, values)


def read_or_refused(content: bytes) -> None:
    """Read a frame, or be refused by a FrameError of one short line.

    Any other exception fails the test.
    """
    said = ""
    try:
        read_frame(content)
    except FrameError as error:
        said = str(error)
    assert len(said) < 400


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    read_or_refused(content)


@given(st.data())
def test_a_frame_with_changed_bytes_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from([REQUEST, last_frame("no data")])))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(content[: data.draw(st.integers(0, len(content)))]))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xff", "cannot be read"),
        (REQUEST[:-1], "cannot be read"),
        (bytes(FRAME_LIMIT + 1), "at most 1056768 are allowed"),
    ],
    ids=["no records", "half a frame", "more than a frame"],
)
def test_what_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        read_frame(content)


def test_numbers_that_would_fill_the_memory_are_refused_where_they_are_read() -> None:
    array = Array("float32", (2**30, 2**30), "numpy.ndarray", Array(np.zeros(2, np.float32)).data)
    sent = request(torch.zeros(2))
    sent[REQUEST_RECORD] = ArrayRecord({"bn": array})
    with pytest.raises(ValueError, match="are not float32"):
        read_request(read_frame(pack_frame(sent)))


def test_a_reason_is_short() -> None:
    said = read_frame(last_frame("no \ud800" + "x" * 1000))[END]
    assert dict(said) == {"reason": "no ?" + "x" * 496}


def test_what_is_too_large_is_not_packed() -> None:
    pack_frame(request(torch.zeros(2, 2**16, dtype=torch.float64)))
    with pytest.raises(FrameError, match="too large"):
        pack_frame(request(torch.zeros(5, 2**16, dtype=torch.float64)))


def test_an_end_that_has_nothing_to_say_says_that_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_channel_frames, "BEAT", 0.01)
    queue: SimpleQueue[bytes | None] = SimpleQueue()
    sent = frames_to_send(queue)
    assert next(sent) == ALIVE
    queue.put(b"frame")
    queue.put(None)
    said = list(sent)
    assert said[-1] == b"frame"
    assert set(said[:-1]) <= {ALIVE}
