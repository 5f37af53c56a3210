"""The arrays of a message as a few long ones: Flower sends every array by requests of its own.

A packed group holds one array for each dtype. The ConfigRecord `packed` has the layout of each group that is packed:
names, dtypes and shapes, as text. A message with this record asks for a packed reply.
"""

import json
from math import prod
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedbn_flwr.state.flat import Entry, FlatArrays, Layout
from fedbn_flwr.state.records import InMemoryArray, array_records, flat_of, make_record, record_of, view_array

PACKED = "packed"
_ASKED, _VERSION = "asked", "version"


def asking(content: RecordDict) -> RecordDict:
    """Return a message's content as it is, and asking for a packed reply."""
    records: dict[str, Any] = dict(content.items())
    return RecordDict({**records, PACKED: ConfigRecord({_ASKED: True})})


def is_packed(content: RecordDict) -> bool:
    """Return whether `pack` has made this; a node that knows nothing of it may send back what only asked."""
    record: Any = content.get(PACKED, {})
    return _ASKED not in record and bool(record)


def pack(content: RecordDict) -> RecordDict:
    """Return a message's content with packed arrays."""
    records: dict[str, Any] = dict(content.items())
    layouts: dict[str, str] = {}
    for name, record in array_records(content).items():
        flat = flat_of(record) or FlatArrays.copy_of({key: view_array(array) for key, array in record.items()})
        if len(flat.buffers) < len(flat):
            records[name] = make_record({dtype.str: InMemoryArray(values) for dtype, values in flat.buffers.items()})
            layouts[name] = json.dumps([(key, dtype.str, shape) for key, dtype, shape in flat.layout.entries])
    return RecordDict({**records, PACKED: ConfigRecord({_VERSION: 1, **layouts})})


def unpack(content: RecordDict) -> RecordDict:
    """Return a message's content as it was before it was packed; ValueError if the layouts do not fit."""
    records: dict[str, Any] = {name: record for name, record in content.items() if name != PACKED}
    layouts: Any = content[PACKED]
    for name, text in layouts.items():
        if name not in (_ASKED, _VERSION):
            records[name] = _unpacked(records.get(name), str(text))
    return RecordDict(records)


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message that holds something else."""
    return Message(metadata=message.metadata, content=content)  # type: ignore[call-overload,no-any-return]


def _unpacked(record: object, text: str) -> ArrayRecord:
    try:
        if not isinstance(record, ArrayRecord):
            raise ValueError("there are none")
        rows: list[tuple[str, str, list[int]]] = json.loads(text)
        entries: tuple[Entry, ...] = tuple((str(name), np.dtype(dtype), tuple(shape)) for name, dtype, shape in rows)
        layout = Layout.of(entries)
        buffers = {np.dtype(dtype): view_array(array) for dtype, array in record.items()}
        found = {dtype: (values.dtype, values.shape) for dtype, values in buffers.items()}
        due = {dtype: (dtype, (_size(members),)) for dtype, members in layout.by_dtype.items()}
        if found != due:
            raise ValueError(f"{found} where {due} are due")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"packed arrays that do not fit their layout: {error}") from None
    return record_of(FlatArrays(layout, buffers))


def _size(entries: list[Entry]) -> int:
    """Return the number of values of all entries."""
    shapes = [shape for _, _, shape in entries]
    if any(length < 0 for shape in shapes for length in shape):
        raise ValueError("a length is negative")
    return sum(map(prod, shapes))
