"""Averaging by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray

from fedbn_flwr.layerwise.exchange import NOT_FINITE, TOO_LARGE, to_shares
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.pooling import average
from fedbn_flwr.server.replies import unusable
from fedbn_flwr.server.round import Round
from fedbn_flwr.state import Arrays, arrays_of, arrays_to_record, view_arrays
from fedbn_flwr.state.flat import FlatArrays

weights = some.lists(some.floats(0, 100), min_size=1, max_size=6).filter(
    lambda values: sum(values) > 1e-3
)


def slow_mean(
    states: Sequence[Mapping[str, NDArray[Any]]], shares: Sequence[float], name: str
) -> NDArray[Any]:
    """One array after another, client after client, in float64."""
    total = np.zeros(states[0][name].shape, np.float64)
    for state, share in zip(states, to_shares(shares), strict=True):
        total = total + state[name].astype(np.float64) * share
    return total.astype(states[0][name].dtype)


def drawn(generator: np.random.Generator) -> Arrays:
    """A state of a few dtypes, with counts, a matrix in Fortran's order, a number and an array of
    no numbers.
    """
    return {
        "matrix": generator.normal(size=(3, 2)).astype(np.float32),
        "count": np.asarray(generator.integers(9)),
        "small count": np.asarray(generator.integers(9, size=3), np.int8),
        "turned": generator.normal(size=(2, 3)).astype(np.float32).T,
        "half": generator.normal(size=4).astype(np.float16),
        "number": np.asarray(generator.normal(), np.float32),
        "empty": np.zeros((0, 2), np.float32),
        "empty double": np.zeros(0),
        "vector": generator.normal(size=7).astype(np.float32),
    }


@given(weights, some.integers(0, 2**31), some.sampled_from([1, 5, 2**17]))
def test_flat_states_are_averaged_to_the_same_bits(
    shares: list[float], seed: int, portion: int
) -> None:
    """States that lie in one buffer a dtype, as in-process clients send them; also beside one that
    does not.
    """
    generator = np.random.default_rng(seed)
    states = [drawn(generator) for _ in shares]
    flat = [FlatArrays.copy_of(state) for state in states]
    assert len({id(state.layout) for state in flat}) == 1
    mixtures: list[list[Mapping[str, NDArray[Any]]]] = [
        [*flat],
        [*states],
        [flat[0], *states[1:]],
        [states[0], *flat[1:]],
    ]
    for mixture in mixtures:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedbn_flwr.state.flat._PORTION", portion)
            got = average(mixture, list(np.array(shares)))  # NumPy's own numbers change no dtype
        assert list(got) == list(states[0])
        for name in got:
            expected = slow_mean(states, shares, name)
            if name.endswith("count"):
                expected = np.stack([state[name] for state in states]).max(0)
            np.testing.assert_array_equal(got[name], expected, strict=True)


def test_a_flat_state_of_another_layout_is_averaged_by_name() -> None:
    one, other = ({"a": np.ones(2), "b": np.zeros(3)}, {"b": np.full(3, 4.0), "a": np.full(2, 3.0)})
    got = average([FlatArrays.copy_of(one), FlatArrays.copy_of(other)], [1, 1])
    assert {name: value.tolist() for name, value in got.items()} == {
        "a": [2.0, 2.0],
        "b": [2.0, 2.0, 2.0],
    }


def test_records_hold_copies_and_views_do_not() -> None:
    arrays = drawn(np.random.default_rng(0))
    for packed in (
        arrays_to_record(arrays),
        ArrayRecord({name: Array(value) for name, value in arrays.items()}),
    ):
        for read in (arrays_of(packed), view_arrays(packed)):
            assert list(read) == list(arrays)
            for name, value in arrays.items():
                np.testing.assert_array_equal(read[name], value, strict=True)
        copied = arrays_of(packed)
        copied["matrix"][:] = 7
        assert view_arrays(packed)["matrix"].tolist() == arrays["matrix"].tolist()
    packed = arrays_to_record(arrays)
    assert np.shares_memory(view_arrays(packed)["matrix"], view_arrays(packed)["matrix"])


def test_the_means_share_no_memory_with_anything() -> None:
    states = [{"a": np.ones(2), "b": np.ones(3)} for _ in range(2)]
    got = average(states, [1, 1])
    got["a"][:] = 7
    assert got["b"].tolist() == [1, 1, 1]
    assert states[0]["a"].tolist() == [1, 1]
    assert average(states[:1], [1])["a"] is not states[0]["a"]


def test_arrays_of_other_shapes_are_refused_or_broadcast_as_numpy_does() -> None:
    assert average(
        [{"a": np.zeros(2), "b": np.zeros(1)}, {"a": np.ones(2), "b": np.ones(())}], [1, 1]
    )["b"] == [0.5]
    with pytest.raises(ValueError, match="broadcast"):
        average([{"a": np.zeros(2), "b": np.zeros(3)}, {"a": np.ones(3), "b": np.ones(2)}], [1, 1])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("portion", [1, 2**17])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["first", "small", "half"])
def test_what_is_not_finite_is_named(
    bad: float, name: str, portion: int, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.state.flat._PORTION", portion)
    arrays = {
        "first": np.zeros((2, 2)),
        "count": np.asarray(3),
        "small": np.zeros(()),
        "half": np.zeros(2, np.float16),
    }
    assert unusable(arrays) is None
    assert unusable({"large": np.full(2, 3e38)}) is None
    assert unusable(FlatArrays.copy_of(arrays)) is None
    assert unusable({"larger": np.full(2, -1e39)}) == ("larger", TOO_LARGE)
    arrays[name] = np.full_like(arrays[name], bad)
    assert unusable(FlatArrays.copy_of(arrays) if flat else arrays) == (name, NOT_FINITE)


@pytest.mark.parametrize(
    "bad", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [2.0, -0.5]]
)
def test_weights_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite"):
        to_shares(bad)


def test_complex_entries_are_refused_by_name() -> None:
    """Their mean would be the largest of them, as that of counters is."""
    arrays = ArrayRecord({"w": Array(np.ones(2, np.complex64))})
    with pytest.raises(UsageError, match="entry 'w' is complex64: only real numbers"):
        Round.begin(1, arrays, ConfigRecord(), grid=None)  # type: ignore[arg-type]
