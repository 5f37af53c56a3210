"""Averaging by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from strategies.average import average, normalize

weights = some.lists(some.floats(0, 100), min_size=1, max_size=6).filter(lambda values: sum(values) > 1e-3)


@given(weights, some.integers(0, 2**31))
def test_mean_is_the_weighted_mean_in_float64(shares: list[float], seed: int) -> None:
    generator = np.random.default_rng(seed)
    states = [{"a": generator.normal(size=(3, 2)).astype(np.float32)} for _ in shares]
    expected = np.average([state["a"].astype(np.float64) for state in states], axis=0, weights=shares)
    got = average(states, shares)["a"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


@given(weights, some.integers(0, 2**31))
def test_variances_stay_at_or_above_zero(shares: list[float], seed: int) -> None:
    generator = np.random.default_rng(seed)
    states = [{"var": generator.exponential(size=4).astype(np.float32) * 1e-30} for _ in shares]
    assert (average(states, shares)["var"] >= 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtype_is_the_arrays_own_even_for_numpy_weights(dtype: type[np.floating]) -> None:
    states = [{"a": np.ones(2, dtype)}, {"a": np.zeros(2, dtype)}]
    assert average(states, [np.float64(1), np.float64(3)])["a"].dtype == dtype
    assert average(states, [1, 3])["a"].tolist() == [0.25, 0.25]


def test_counters_take_the_largest_and_stay_0d_integers() -> None:
    mean = average([{"n": np.asarray(3)}, {"n": np.asarray(8)}, {"n": np.asarray(5)}], [1, 1, 1])["n"]
    assert (str(mean.dtype), mean.shape, int(mean)) == ("int64", (), 8)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [2.0, -0.5]])
def test_weights_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="aggregation weights"):
        normalize(bad)
