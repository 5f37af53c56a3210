"""Arrays of a message as a few long ones."""

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr.wire.packed import PACKED, asking, pack, unpack


def content() -> RecordDict:
    arrays: dict[str, np.ndarray] = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "count": np.array(7, dtype=np.int64),
        "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "none": np.zeros((0, 2), np.float32),
        "more": np.full(3, np.pi),
    }
    return RecordDict(
        {
            "arrays": ArrayRecord({name: Array(value) for name, value in arrays.items()}),
            "one": ArrayRecord({"sum": Array(np.ones((2, 5), np.uint64))}),
            "config": ConfigRecord({"lr": 0.1}),
        }
    )


def test_what_is_unpacked_is_what_was_packed() -> None:
    packed = pack(content())
    assert sorted(packed.array_records["arrays"]) == ["<f4", "<f8", "<i8"]
    assert list(packed.array_records["one"]) == ["sum"]
    found = unpack(packed)
    assert set(found) == {"arrays", "one", "config"}
    assert found["config"] == {"lr": 0.1}
    for name, record in content().array_records.items():
        assert list(found.array_records[name]) == list(record)
        for key, array in record.items():
            wanted, numbers = array.numpy(), found.array_records[name][key].numpy()
            assert (numbers.dtype, numbers.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(numbers, wanted)


def test_a_message_that_asks_is_unpacked_as_it_is() -> None:
    assert unpack(asking(content())) == content()


def layouts(packed: RecordDict) -> Any:
    return packed[PACKED]


@pytest.mark.parametrize("fault", ["no text", "other size", "negative", "other dtype", "no group", "object"])
def test_a_layout_that_does_not_fit_is_named(fault: str) -> None:
    packed = pack(content())
    rows = json.loads(layouts(packed)["arrays"])
    if fault == "other size":
        rows[0][2] = [2, 4]
    elif fault == "negative":
        rows[0][2] = [-2, -3]
    elif fault == "other dtype":
        rows[0][1] = "<f2"
    elif fault == "object":
        rows[0][1] = "|O"
    layouts(packed)["no" if fault == "no group" else "arrays"] = "{" if fault == "no text" else json.dumps(rows)
    with pytest.raises(ValueError, match="packed arrays that do not fit their layout"):
        unpack(packed)
