"""Objects come out of a pipe as they went in."""

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedbn_flwr.simulation.processes.pipe import ObjectPipe

SIZES = [0, 1, 5_000, 1_000_000]


@pytest.fixture
def ends() -> Iterator[tuple[ObjectPipe, ObjectPipe]]:
    one, other = map(ObjectPipe, Pipe())
    yield one, other
    one.close()
    other.close()


def sent(ends: tuple[ObjectPipe, ObjectPipe], item: Any) -> Any:
    """Through it: larger items than fit into a socket need a reader."""
    writer = threading.Thread(target=ends[0].send, args=(item,))
    writer.start()
    received = ends[1].receive()
    writer.join()
    return received


@pytest.mark.parametrize("size", SIZES)
def test_arrays_of_any_size_keep_their_bytes_and_can_be_changed_as_before(
    ends: tuple[ObjectPipe, ObjectPipe], size: int
) -> None:
    value = np.random.default_rng(0).normal(size=size).astype("float32")
    record = ArrayRecord({"a": Array(value), "b": Array(np.array(size))})
    found = sent(ends, {"record": record, "more": "text"})
    assert found == {"record": record, "more": "text"}
    assert type(found["record"]["a"].data) is bytes
    fixed = value.copy()
    fixed.flags.writeable = False
    changeable, unchangeable = sent(ends, [value, fixed])
    np.testing.assert_array_equal(changeable, value)
    np.testing.assert_array_equal(unchangeable, value)
    assert (changeable.flags.writeable, unchangeable.flags.writeable) == (True, False)


def test_what_occurs_twice_travels_once(ends: tuple[ObjectPipe, ObjectPipe]) -> None:
    record = ArrayRecord({"a": Array(np.zeros(100_000))})
    first, second = sent(ends, [{"to": 1, "arrays": record}, {"to": 2, "arrays": record}])
    assert first["arrays"] is second["arrays"]


def test_several_items_come_in_their_order_and_then_an_end(
    ends: tuple[ObjectPipe, ObjectPipe],
) -> None:
    for item in ("a", [1, 2], None):
        ends[0].send(item)
    ends[0].close()
    assert [ends[1].receive() for _ in range(3)] == ["a", [1, 2], None]
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError, match=r"."):
        ends[1].send("late")


def test_an_end_in_the_middle_of_an_item_is_an_end() -> None:
    one, other = Pipe()
    with one, other:
        ObjectPipe(one).send(np.zeros(4_000))
        whole = os.read(other.fileno(), 100_000)
        for size in (1, 20, len(whole) - 1):
            sender, receiver = Pipe()
            with sender, receiver:
                os.write(sender.fileno(), whole[:size])
                sender.close()
                with pytest.raises(EOFError):
                    ObjectPipe(receiver).receive()
