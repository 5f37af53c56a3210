"""A flat state is the state: to torch, to numpy, to Flower, and to another process."""

import copy
import pickle

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

from fedbn_flwr import state
from fedbn_flwr.state.flat import FlatArrays, FlatState
from fedbn_flwr.state.records import flat_of
from tests.helpers.toys import assert_same_state, random_state, toy_cnn

#: of several dtypes in turn, with a counter, an empty tensor and one in another order of memory
STATE: dict[str, Tensor] = {
    "weight": torch.arange(24.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "half": torch.arange(4, dtype=torch.float16),
    "bias": torch.tensor([-1.5, 2.0]),
    "flags": torch.tensor([True, False]),
    "small": torch.tensor([[1, 255]], dtype=torch.uint8),
    "double": torch.tensor(0.1, dtype=torch.float64),
    "scale": torch.tensor(3.0),
}


def test_it_is_the_state() -> None:
    flat = FlatState.copy_of(STATE)
    assert_same_state(flat, STATE)
    assert len(flat.buffers) == len({value.dtype for value in STATE.values()})
    assert "bias" in flat
    assert "other" not in flat
    assert_same_state(FlatArrays(flat.layout, flat.buffers).tensors, STATE)


@pytest.mark.parametrize("names", [list(STATE), ["bias"]])
def test_it_is_a_copy(names: list[str]) -> None:
    given = {name: STATE[name].clone() for name in names}
    flat = FlatState.copy_of(given)
    for value in given.values():
        value.fill_(0)
    assert_same_state(flat, {name: STATE[name] for name in names})


def test_stacked_states_come_apart_and_together() -> None:
    rows: list[dict[str, Tensor]] = [
        {**random_state(toy_cnn(), seed), "none": torch.zeros(0, 2)} for seed in range(3)
    ]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    apart = FlatState.copies_of(stacked, 3)
    for row, flat in zip(rows, apart, strict=True):
        assert_same_state(flat, row)
    assert_same_state(FlatState.stacked(apart), stacked)


def test_tensors_may_be_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on another device is brought here first, in one piece."""
    brought: list[Tensor] = []

    def bring(part: Tensor) -> Tensor:
        brought.append(part)
        return torch.ones(part.shape)

    monkeypatch.setattr(Tensor, "cpu", bring)
    there = {"there": torch.zeros(3, device="meta"), "there too": torch.zeros(2, device="meta")}
    flat = FlatState.copy_of({"here": torch.zeros(2), **there})
    assert [(part.device.type, len(part)) for part in brought] == [("meta", 5)]
    assert {name: value.tolist() for name, value in flat.items()} == {
        "here": [0, 0],
        "there": [1, 1, 1],
        "there too": [1, 1],
    }


def test_states_that_are_alike_have_one_layout() -> None:
    first, second = FlatState.copy_of(STATE), FlatState.copy_of(dict(STATE))
    assert first.layout is second.layout
    assert FlatArrays.layout_of(FlatArrays(first.layout, first.buffers)) is first.layout
    assert pickle.loads(pickle.dumps(first.layout)) is first.layout
    assert (
        FlatState.copy_of({**STATE, "bias": torch.zeros(2, dtype=torch.float64)}).layout
        is not first.layout
    )
    assert FlatState.copy_of(dict(reversed(STATE.items()))).layout is not first.layout


def plain(values: dict[str, Tensor]) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(np.array(value.numpy(), order="C")) for name, value in values.items()}
    )


def test_a_record_of_it_is_flowers_own_to_everybody_who_looks() -> None:
    record, wanted = state.to_record(STATE), plain(STATE)
    assert record == wanted
    assert wanted == record
    assert list(record) == list(wanted) == list(record.keys())
    assert len(record) == len(wanted)
    assert ("bias" in record, "other" in record) == (True, False)
    assert record["count"] == wanted["count"]
    assert record["count"] is record["count"]
    assert record.count_bytes() == wanted.count_bytes()
    assert record.deflate() == wanted.deflate()
    assert next(iter(STATE)) in repr(record)
    with pytest.raises(KeyError, match="other"):
        record["other"]
    assert_same_state(record.to_torch_state_dict(), STATE)
    for mine, theirs in zip(record.to_numpy_ndarrays(), wanted.to_numpy_ndarrays(), strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def test_on_a_wire_it_is_a_plain_record() -> None:
    sent = get_all_nested_objects(RecordDict({"arrays": state.to_record(STATE)}))
    wanted = get_all_nested_objects(RecordDict({"arrays": plain(STATE)}))
    assert {key: part.deflate() for key, part in sent.items()} == {
        key: part.deflate() for key, part in wanted.items()
    }


@pytest.mark.parametrize("again", [lambda given: pickle.loads(pickle.dumps(given)), copy.deepcopy])
def test_a_copy_for_another_process_is_a_plain_record(again: object) -> None:
    record = state.to_record(STATE)
    assert callable(again)
    received = again(record)
    assert received == record
    assert {type(array) for array in received.values()} == {Array}
    assert type(received.__dict__["_data"]) is dict


def test_a_changed_record_is_what_it_was_changed_to() -> None:
    record = state.to_record(STATE)
    record["bias"] = Array(np.full(2, 5.0, np.float32))
    del record["half"]
    record["new"] = Array(np.zeros(1))
    wanted = {name: value for name, value in STATE.items() if name != "half"}
    wanted |= {"bias": torch.full((2,), 5.0), "new": torch.zeros(1, dtype=torch.float64)}
    assert_same_state(state.from_record(record), wanted)
    assert flat_of(record) is None
    shallow = state.to_record(STATE).copy()
    del shallow["bias"]
    assert "bias" not in shallow


def test_an_array_changed_in_its_place_counts() -> None:
    record = state.to_record(STATE)
    record["bias"].data = Array(np.full(2, 5.0, np.float32)).data
    assert state.from_record(record)["bias"].tolist() == [5, 5]
    assert state.view_record(record)["bias"].tolist() == [5, 5]


def test_what_is_unpacked_owns_its_memory() -> None:
    record = state.to_record(STATE)
    for value in state.from_record(record).values():
        assert value.untyped_storage().nbytes() == value.nbytes
        value.fill_(0)
    assert_same_state(state.from_record(record), STATE)


def test_nothing_is_copied_to_read_or_to_give_it() -> None:
    flat = FlatState.copy_of(STATE)
    record = state.to_record(flat, copy=False)
    lent = state.view_record(record)
    assert all(lent[name].data_ptr() == flat[name].data_ptr() for name in STATE)
    assert state.view_record(record) is lent
