"""Arrays that are serialized late are Flower's own to everybody who looks."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedbn_flwr.state import records as arrays
from fedbn_flwr.state.records import make_record, view_array
from tests.helpers.toys import hold

VALUES: list[NDArray[np.generic]] = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.float64).reshape(2, 3).T,
    np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(10.0)[::2],
    np.asarray(7, dtype=np.int64),
    np.asarray(0.5, dtype=np.float32),
    np.array([True, False]),
    np.zeros((0, 3), dtype=np.float32),
    np.arange(3, dtype=">i2"),
]


@pytest.fixture
def serialized(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.generic]]:
    """What has been serialized since the test began."""
    done: list[NDArray[np.generic]] = []
    real = arrays._serialize

    def noting(value: NDArray[np.generic]) -> bytes:
        done.append(value)
        return real(value)

    monkeypatch.setattr(arrays, "_serialize", noting)
    return done


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}{value.shape}")
def test_it_is_what_flowers_own_array_would_be(value: NDArray[np.generic]) -> None:
    held, plain = hold(value), Array(np.asarray(value))
    assert isinstance(held, Array)
    assert (held.dtype, held.shape, held.stype, len(held.data)) == (
        plain.dtype,
        plain.shape,
        plain.stype,
        len(plain.data),
    )
    got, wanted = held.numpy(), plain.numpy()
    assert got.dtype == wanted.dtype
    assert got.flags.f_contiguous == wanted.flags.f_contiguous
    np.testing.assert_array_equal(got, wanted, strict=True)
    assert held.data == plain.data
    assert held.deflate() == plain.deflate()
    assert held.object_id == plain.object_id
    assert list(held.children) == list(plain.children)
    assert held == plain
    assert plain == held
    assert ArrayRecord({"a": held}) == make_record({"a": held}) == ArrayRecord({"a": plain})


def test_unequal_arrays_are_unequal() -> None:
    held = hold(np.zeros(2))
    assert held != hold(np.ones(2))
    assert held != Array(np.zeros(2, np.float32))
    assert held != "held"


def test_bytes_once_made_stay_true_and_numbers_that_are_read_are_copies() -> None:
    held = hold(np.zeros(3))
    before = held.data
    held.numpy()[:] = 2
    assert (held.data, held.numpy().tolist()) == (before, [0, 0, 0])
    assert Array(held.dtype, held.shape, held.stype, held.data).numpy().tolist() == [0, 0, 0]


def test_a_change_is_what_it_would_be_in_a_plain_array() -> None:
    held, plain = hold(np.zeros(3)), Array(np.zeros(3))
    ids = {held.object_id}
    held.data = plain.data = Array(np.ones(3)).data
    assert held.numpy().tolist() == [1, 1, 1]
    assert view_array(held).tolist() == [1, 1, 1]
    assert held.object_id == plain.object_id not in ids
    held = hold(np.zeros(3))
    held.shape = (1, 3)
    assert (held.shape, held.data) == ((1, 3), Array(np.zeros(3)).data)


def test_it_has_no_attributes_that_flowers_array_has_not() -> None:
    with pytest.raises(AttributeError, match="'InMemoryArray' object has no attribute 'nothing'"):
        _ = hold(np.zeros(3)).nothing
