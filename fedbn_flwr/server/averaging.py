"""Averaging state dicts by name: exact dtypes, counters that stay counters, weights that are what they say."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedbn_flwr.layerwise.exchange import LARGEST, NOT_FINITE, TOO_LARGE, Fault, normalized
from fedbn_flwr.state.flat import FlatArrays
from fedbn_flwr.state.records import flat_of, record_of, view_array

Arrays = dict[str, NDArray[Any]]

#: how many numbers are averaged at a time: as many as stay in a processor's cache
_PORTION = 2**17


def arrays_to_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Pack copies of arrays for a message."""
    return record_of(FlatArrays.copy_of({name: np.asarray(value) for name, value in arrays.items()}))


def arrays_of(packed: ArrayRecord) -> Arrays:
    """Copies of the arrays of a message."""
    if (flat := flat_of(packed)) is not None:
        return {name: array.copy() for name, array in flat.items()}
    return {name: array.numpy() for name, array in packed.items()}


def view_arrays(packed: ArrayRecord) -> FlatArrays:
    """The arrays of a message, without copies where they were never serialized: to be read only."""
    flat = flat_of(packed)
    return FlatArrays.copy_of({name: view_array(array) for name, array in packed.items()}) if flat is None else flat


def average(states: Sequence[Mapping[str, NDArray[Any]]], weights: Sequence[float]) -> Arrays:
    """The weighted mean of every array, in the array's own dtype.

    Sums are formed in float64. Integers and booleans (BN's batch counters) are not measurements to be averaged: the
    largest is taken, so that a 0-d int64 counter stays one and never runs backwards.
    """
    shares, flat = normalized(weights), [_flat(state) for state in states]
    first = flat[0]
    if any(state.layout is not first.layout for state in flat):
        return {name: _mean([state[name] for state in states], shares) for name in first}
    means = {dtype: _mean_run([state.buffers[dtype] for state in flat], shares) for dtype in first.buffers}
    return dict(FlatArrays(first.layout, means).items())


def _flat(state: Mapping[str, NDArray[Any]]) -> FlatArrays:
    return state if isinstance(state, FlatArrays) else FlatArrays.copy_of(state)


def is_floating(array: NDArray[Any]) -> bool:
    """Whether the numbers can be averaged: floating-point numbers, not counts."""
    return array.dtype.kind == "f"


def unusable(arrays: Mapping[str, NDArray[Any]]) -> tuple[str, Fault] | None:
    """The first of the arrays that holds what nobody may send, and why not: infinity, no number, or one too large."""
    if isinstance(arrays, FlatArrays) and all(map(_is_usable, arrays.buffers.values())):
        return None
    bad = [(name, array) for name, array in arrays.items() if not _is_usable(array.reshape(-1))]
    return (bad[0][0], TOO_LARGE if np.isfinite(bad[0][1]).all() else NOT_FINITE) if bad else None


def _is_usable(run: NDArray[Any]) -> bool:
    # float32 holds nothing larger
    sound = np.isfinite if run.itemsize < 8 else lambda numbers: abs(numbers) <= LARGEST
    return run.dtype.kind not in "fc" or all(sound(run[part]).all() for part in _parts(run))


def _parts(run: NDArray[Any]) -> list[slice]:
    return [slice(start, start + _PORTION) for start in range(0, len(run), _PORTION)]


def _mean_run(runs: Sequence[NDArray[Any]], shares: Sequence[float]) -> NDArray[Any]:
    """Of runs of numbers, by portions; number by number the same sums as of the arrays in them."""
    return np.concatenate([_mean((run[part] for run in runs), shares) for part in _parts(runs[0])] or [runs[0][:]])


def _mean(values: Iterable[NDArray[Any]], shares: Sequence[float]) -> NDArray[Any]:
    ahead = iter(values)
    first = next(ahead)
    if not is_floating(first):
        return np.asarray(reduce(np.maximum, ahead, first), dtype=first.dtype)
    total = np.zeros(first.shape, np.float64)
    for value, share in zip(chain([first], ahead), shares, strict=True):
        total += np.asarray(value, np.float64) * share
    return np.asarray(total, dtype=first.dtype)
