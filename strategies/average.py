"""Averaging state dicts by name: exact dtypes, counters that stay counters, weights that are what they say."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedbn_flwr.arrays import hold, make_record

Arrays = dict[str, NDArray[Any]]


def record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Pack copies of arrays for a message."""
    return make_record({name: hold(np.asarray(value)) for name, value in arrays.items()})


def unpack(packed: ArrayRecord) -> Arrays:
    """Copies of the arrays of a message."""
    return {name: array.numpy() for name, array in packed.items()}


def normalize(weights: Sequence[float]) -> list[float]:
    """Scale weights to sum 1; a negative, non-finite or all-zero set is an error."""
    total = sum(weights)
    if not np.isfinite(total) or total <= 0 or min(weights) < 0:
        raise ValueError(f"aggregation weights must be finite, not negative and not all zero, got {list(weights)}")
    return [weight / total for weight in weights]


def average(states: Sequence[Mapping[str, NDArray[Any]]], weights: Sequence[float]) -> Arrays:
    """The weighted mean of every array, in the array's own dtype.

    Sums are formed in float64. Integers and booleans (BN's batch counters) are not measurements to be averaged: the
    largest is taken, so that a 0-d int64 counter stays one and never runs backwards.
    """
    shares = normalize(weights)
    return {name: _mean([state[name] for state in states], shares) for name in states[0]}


def _mean(values: Sequence[NDArray[Any]], shares: Sequence[float]) -> NDArray[Any]:
    own = values[0].dtype
    if not np.issubdtype(own, np.floating):
        return np.asarray(np.maximum.reduce(values), dtype=own)
    total = np.zeros(values[0].shape, np.float64)
    for value, share in zip(values, shares, strict=True):
        total += np.asarray(value, np.float64) * share
    return np.asarray(total, dtype=own)
