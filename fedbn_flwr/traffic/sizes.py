"""Bytes of the arrays of messages."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from fedbn_flwr.state.flat import FlatArrays, Layout
from fedbn_flwr.state.records import array_records, distinct, flat_of, payload_bytes


class Sizes(NamedTuple):
    """The bytes of arrays: of all, and of those that papers count."""

    payload: int
    paper: int


def message_sizes(message: Message) -> Sizes:
    """Return the bytes of all arrays of a message."""
    sizes = [_record_sizes(record) for record in array_records(message.content).values()]
    return Sizes(sum(each.payload for each in sizes), sum(each.paper for each in sizes))


def _record_sizes(record: ArrayRecord) -> Sizes:
    if (flat := flat_of(record)) is not None:
        return _flat_sizes(flat.layout)
    return _arrays_sizes((np.dtype(array.dtype), array.shape) for array in record.values())


@lru_cache(maxsize=1024)
def _flat_sizes(layout: Layout) -> Sizes:
    return _arrays_sizes((dtype, shape) for _, dtype, shape in layout.entries)


def _arrays_sizes(arrays: Iterable[tuple[np.dtype[Any], tuple[int, ...]]]) -> Sizes:
    sizes = [(prod(shape) * dtype.itemsize, _is_measured(str(dtype))) for dtype, shape in arrays]
    return Sizes(sum(size for size, _ in sizes), sum(size for size, measured in sizes if measured))


def paper_bytes(messages: Sequence[Message]) -> int:
    """Return the bytes that papers count of what a server sends: equal arrays of one name once, and no counters."""
    groups: dict[str, dict[int, ArrayRecord]] = {}
    for message in messages:
        for group, record in array_records(message.content).items():
            groups.setdefault(group, {})[id(record)] = record
    return sum(_distinct_bytes(list(records.values())) for records in groups.values())


def _distinct_bytes(records: Sequence[ArrayRecord]) -> int:
    states = [state for record in records if (state := flat_of(record)) is not None]
    if len(states) == len(records) and len({id(state.layout) for state in states}) == 1:
        if len(states) == 1:
            return _flat_sizes(states[0].layout).paper
        return _distinct_flat_bytes(states)
    named: dict[str, list[Array]] = {}
    for record in records:
        for name, array in record.items():
            if _is_measured(array.dtype):
                named.setdefault(name, []).append(array)
    return sum(payload_bytes(array) for arrays in named.values() for array in distinct(arrays))


def _distinct_flat_bytes(states: Sequence[FlatArrays]) -> int:
    """Return the bytes of states of one layout, cut out of their buffers: views of all entries would take longer."""
    total = 0
    for dtype, entries in states[0].layout.by_dtype.items():
        if not _is_measured(str(dtype)):
            continue
        end = 0
        for _, _, shape in entries:
            start, end = end, end + prod(shape)
            different = {state.buffers[dtype][start:end].tobytes() for state in states}
            total += (end - start) * dtype.itemsize * len(different)
    return total


def _is_measured(dtype: str) -> bool:
    return "int" not in dtype
