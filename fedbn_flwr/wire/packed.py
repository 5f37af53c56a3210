"""The arrays of a message as a few long ones: Flower sends every array by requests of its own.

A packed group holds one array for each dtype. The ConfigRecord `packed` has the layout of each
group that is packed: names, dtypes and shapes, as text. A message with this record asks for a
packed reply.
"""

import json
from math import prod
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import SType

from fedbn_flwr.state import view_arrays
from fedbn_flwr.state.flat import Entry, FlatArrays, Layout
from fedbn_flwr.state.records import (
    InMemoryArray,
    array_records,
    make_record,
    record_of,
    view_array,
)

PACKED = "packed"
#: a record, its packed one, and the layout
Packed = tuple[ArrayRecord, ArrayRecord, str]
_ASKED = "asked"
_VERSION = "version"
#: of an array of NumPy's
_DIMENSIONS = 64


def asking(content: RecordDict) -> RecordDict:
    """Return a message's content as it is, and asking for a packed reply."""
    records: dict[str, Any] = dict(content.items())
    return RecordDict({**records, PACKED: ConfigRecord({_ASKED: True})})


def is_packed(content: RecordDict) -> bool:
    """Return whether `pack` has made this.

    A node that knows nothing of it may send back what only asked.
    """
    record: Any = content.get(PACKED, {})
    return _ASKED not in record and bool(record)


def pack(content: RecordDict, known: dict[int, Packed] | None = None) -> RecordDict:
    """Return a message's content with packed arrays.

    `known` has the records that several messages share, by id.
    """
    records: dict[str, Any] = dict(content.items())
    layouts: dict[str, str] = {}
    known = {} if known is None else known
    for name, record in array_records(content).items():
        if id(record) not in known:
            known[id(record)] = record, *_packed(record)
        _, records[name], layout = known[id(record)]
        if layout:
            layouts[name] = layout
    return RecordDict({**records, PACKED: ConfigRecord({_VERSION: 1, **layouts})})


def unpack(content: RecordDict) -> RecordDict:
    """Return a message's content as it was before it was packed; ValueError if the layouts do not
    fit.
    """
    records: dict[str, Any] = {name: record for name, record in content.items() if name != PACKED}
    layouts: Any = content[PACKED]
    for name, text in layouts.items():
        if name not in (_ASKED, _VERSION):
            records[name] = _unpacked(records.get(name), str(text))
    return RecordDict(records)


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message that holds something else."""
    return Message(metadata=message.metadata, content=content)  # type: ignore[call-overload,no-any-return]


def _packed(record: ArrayRecord) -> tuple[ArrayRecord, str]:
    """Return the packed record and its layout.

    The record itself, and none, where nothing is won, or not of numbers.
    """
    for array in record.values():
        dtype = np.dtype(array.dtype)
        if array.stype != SType.NUMPY or dtype.kind not in "biufc" or not dtype.isnative:
            return record, ""
    flat = view_arrays(record)
    if len(flat.buffers) >= len(flat):
        return record, ""
    packed = make_record(
        {dtype.str: InMemoryArray(values) for dtype, values in flat.buffers.items()}
    )
    return packed, json.dumps(
        [(key, dtype.str, shape) for key, dtype, shape in flat.layout.entries]
    )


def _unpacked(record: object, text: str) -> ArrayRecord:
    try:
        if not isinstance(record, ArrayRecord):
            raise ValueError("there are none")
        layout = Layout(tuple(_entry(*row) for row in json.loads(text)))
        if len({name for name, _, _ in layout.entries}) < len(layout.entries):
            raise ValueError("two entries have one name")
        buffers = {np.dtype(dtype): view_array(array) for dtype, array in record.items()}
        found = {dtype: (values.dtype, values.shape) for dtype, values in buffers.items()}
        due = {}
        for dtype, rows in layout.by_dtype.items():
            due[dtype] = (dtype, (sum(prod(shape) for _, _, shape in rows),))
        if found != due:
            raise ValueError(f"{found} where {due} are due")
    except Exception as error:  # what a node sends may be anything
        raise ValueError(f"packed arrays that do not fit their layout: {error}") from None
    return record_of(FlatArrays(Layout.of(layout.entries), buffers))


def _entry(name: str, dtype: str, shape: list[int]) -> Entry:
    """Return an entry of a layout; ValueError if it is none."""
    if (
        not isinstance(name, str)
        or len(shape) > _DIMENSIONS
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise ValueError(f"{name!r} of the shape {shape}")
    return name, np.dtype(dtype), tuple(shape)
