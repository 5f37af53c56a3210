"""What a bad node may send: every kind of nonsense as a change of its reply, and a grid in which
one node sends it.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode, SType

from fedbn_flwr import wire
from fedbn_flwr.server.grids import identify
from fedbn_flwr.transports.message_records import LACKS_ARRAYS, UNREACHABLE
from tests.helpers.faults import FAULTY, Faulty

BAD = FAULTY
#: changes the content of a reply, in place
Change = Callable[[RecordDict], object]


def npy(descr: object, shape: object, numbers: bytes = b"") -> Array:
    """Return an array whose bytes are this header, and these numbers."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + numbers
    return Array("float32", (3,), SType.NUMPY, data)


def bytes_of(
    data: bytes, dtype: str = "float32", shape: tuple[int, ...] = (3,), stype: str = SType.NUMPY
) -> Array:
    """Return an array of these bytes."""
    return Array(dtype, shape, stype, data)


def plain(values: Any) -> Array:
    """Return the array that Flower makes of values."""
    return Array(np.asarray(values))


def zipped(values: np.ndarray) -> Array:
    """Return what `np.savez` makes of values, as an array."""
    file = BytesIO()
    np.savez(file, values)
    return bytes_of(file.getvalue())


def array(make: Callable[[np.ndarray], Array]) -> Change:
    """Return a change of the first array of floating-point numbers, whatever group it is in."""

    def change(content: RecordDict) -> None:
        for group, record in content.array_records.items():
            for name, old in record.items():
                if old.dtype.startswith("float"):
                    content[group] = ArrayRecord({**record, name: make(old.numpy())})
                    return

    return change


def entries(change_of: Callable[[dict[str, Array]], dict[str, Array]], of: str = "") -> Change:
    """Return a change of a group of arrays, by default the first."""

    def change(content: RecordDict) -> None:
        for group in [group for group in content.array_records if not of or group == of][:1]:
            content[group] = ArrayRecord(change_of(dict(content.array_records[group])))

    return change


def counters(value: int) -> Change:
    """Return a change of all whole numbers."""

    def change(content: RecordDict) -> None:
        for group, record in content.array_records.items():
            new = {
                name: plain(np.full_like(old.numpy(), value)) if old.dtype == "int64" else old
                for name, old in record.items()
            }
            content[group] = ArrayRecord(new)

    return change


def record(name: str, value: Any) -> Change:
    """Return a change of a whole record; None is none."""

    def change(content: RecordDict) -> None:
        content.pop(name, None)
        if value is not None:
            content[name] = value

    return change


def metric(key: str, value: object) -> Change:
    """Return a change of a metric, past Flower's own checks; None is none."""

    def change(content: RecordDict) -> None:
        metrics = content.metric_records.get(wire.METRICS, MetricRecord())
        values = metrics.__dict__["_data"]
        values.pop(key, None)
        if value is not None:
            values[key] = value
        content[wire.METRICS] = metrics

    return change


def losses(value: object) -> Change:
    """Return a change of the losses, of training and of evaluation."""
    train, evaluate = metric(wire.TRAIN_LOSS, value), metric(wire.EVAL_LOSS, value)

    def change(content: RecordDict) -> None:
        (evaluate if wire.EVAL_LOSS in content.metric_records.get(wire.METRICS, {}) else train)(
            content
        )

    return change


def report(key: str, value: Any) -> Change:
    """Return a change of the report; None is none."""

    def change(content: RecordDict) -> None:
        values = {**content.config_records.get(wire.REPORT, {}), key: value}
        content[wire.REPORT] = ConfigRecord(
            {name: each for name, each in values.items() if each is not None}
        )

    return change


def all_records(make: Callable[[], Any]) -> Change:
    """Return a change that puts another record in the place of every one."""
    return lambda content: content.update({name: make() for name in content})


def every(change: Callable[[Array], Array]) -> Change:
    """Return a change of every array."""
    return entries(lambda arrays: {name: change(value) for name, value in arrays.items()})


#: what a header of 10^12 float32 numbers says
HUGE = (10**6, 10**6)
#: a pickle that imports and calls something
PICKLE = b"cbuiltins\neval\n(S'1/0'\ntR."

NONSENSE: dict[str, Change] = {
    # bytes that are no arrays
    "an array of objects": array(lambda old: npy("|O", old.shape, PICKLE)),
    "a pickle": array(lambda _: bytes_of(PICKLE)),
    "a header cut short": array(lambda _: bytes_of(b"\x93NUMPY\x01\x00\xff\xff{'descr'")),
    "numbers cut short": array(lambda old: bytes_of(plain(old).data[:-3])),
    "bytes after the numbers": array(lambda old: bytes_of(plain(old).data + b"more")),
    "a header of 10^12 numbers": array(lambda _: npy("<f4", HUGE)),
    "a header of -1 numbers": array(lambda _: npy("<f4", (-1,))),
    "a header whose dtype is a number": array(lambda old: npy(5, old.shape, bytes(old.nbytes))),
    "a zip of arrays": array(zipped),
    "another serialization": array(lambda old: bytes_of(plain(old).data, stype="pickle")),
    "a dtype that is none": array(lambda old: bytes_of(plain(old).data, "nonsense", old.shape)),
    "a shape that is not its own": array(
        lambda old: bytes_of(plain(old).data, str(old.dtype), HUGE)
    ),
    # arrays that are not the model's
    "float64": array(lambda old: plain(old.astype(np.float64))),
    "whole numbers": array(lambda old: plain(old.astype(np.int64))),
    "truth values": array(lambda old: plain(old > 0)),
    "texts": array(lambda old: plain(old.astype(str))),
    "fields": array(lambda old: plain(np.zeros(old.shape, [("a", "f4")]))),
    "another shape": array(lambda old: plain(np.zeros((*old.shape, 2), old.dtype))),
    "no numbers": array(lambda old: plain(old[:0])),
    "another name": entries(lambda arrays: {f"x.{name}": value for name, value in arrays.items()}),
    "one array too few": entries(lambda arrays: dict(list(arrays.items())[1:])),
    "one array too many": entries(
        lambda arrays: {**arrays, "more": plain(np.zeros(2, np.float32))}
    ),
    "no arrays": entries(lambda _: {}),
    "a group of objects": record("more", ArrayRecord({"x": npy("|O", (1,), PICKLE)})),
    # numbers that are none, or too large
    "not a number": array(lambda old: plain(np.full_like(old, np.nan))),
    "infinity": array(lambda old: plain(np.full_like(old, np.inf))),
    # counts
    "no count": metric(wire.NUM_EXAMPLES, None),
    "a count of -5": metric(wire.NUM_EXAMPLES, -5),
    "a count of 10^16": metric(wire.NUM_EXAMPLES, 10**16),
    "a count of 10^400": metric(wire.NUM_EXAMPLES, 10**400),
    "a count that is not a number": metric(wire.NUM_EXAMPLES, float("nan")),
    "an infinite count": metric(wire.NUM_EXAMPLES, float("inf")),
    "a list of counts": metric(wire.NUM_EXAMPLES, [5, 5]),
    "a count as a text": metric(wire.NUM_EXAMPLES, "12"),
    # partitions
    "a partition that is not a number": metric(wire.PARTITION_ID, float("nan")),
    "a partition of 10^30": metric(wire.PARTITION_ID, 10**30),
    "half a partition": metric(wire.PARTITION_ID, 1.5),
    "a partition as a text": metric(wire.PARTITION_ID, "one"),
    # metrics
    "a list of losses": losses([1.0, 2.0]),
    "no losses in a list": losses([]),
    "a loss as a text": losses("small"),
    "a loss of 1e300": losses(1e300),
    # records
    "no records": lambda content: content.clear(),
    "empty metrics": record(wire.METRICS, MetricRecord()),
    "no metrics": record(wire.METRICS, None),
    "a configuration for metrics": record(wire.METRICS, ConfigRecord({wire.NUM_EXAMPLES: 12})),
    "metrics for arrays": lambda content: content.update(
        {name: MetricRecord({"x": 1}) for name in content.array_records}
    ),
    "arrays for a report": record(wire.REPORT, ArrayRecord({"x": plain(np.zeros(2))})),
    "configurations for all records": all_records(ConfigRecord),
    "arrays for all records": all_records(lambda: ArrayRecord({"x": npy("|O", (1,), PICKLE)})),
    # reports
    "the state is lost, every time": report(wire.LACKS_STATE, True),
}

#: in the place of the variates of SCAFFOLD's nodes
VARIATES: dict[str, Change] = {
    "no variates": record(wire.CONTROL_VARIATES, None),
    **{
        f"{name} variates": entries(change, wire.CONTROL_VARIATES)
        for name, change in {
            "too few": lambda arrays: dict(list(arrays.items())[1:]),
            "too many": lambda arrays: {**arrays, "more": plain(np.zeros(2, np.float32))},
            "wider": lambda arrays: {
                name: plain(value.numpy()[None]) for name, value in arrays.items()
            },
        }.items()
    },
}

#: nonsense that takes nothing from the others: the reply counts, or its message does not read what
#: is wrong with it
HARMLESS: dict[str, Change] = {
    "a metric more": metric("more", 3.0),
    "a list of metrics more": metric("more", [1.0, 2.0]),
    "a score more": metric(f"{wire.SCORE}more", 3.0),
    "a count of 10^12": metric(wire.NUM_EXAMPLES, 10**12),
    "no loss": losses(None),
    "a loss that is not a number": losses(float("nan")),
    "counters of 2^63 - 1": counters(2**63 - 1),
    "a count of 0": metric(wire.NUM_EXAMPLES, 0),
    "half a sample": metric(wire.NUM_EXAMPLES, 0.5),
    "another node's partition": metric(wire.PARTITION_ID, 2),
    "a partition of -7": metric(wire.PARTITION_ID, -7),
    "a sound group more": record("more", ArrayRecord({"x": plain(np.zeros(2))})),
    "a configuration more": record("more", ConfigRecord({"x": b"\x00" * 1000})),
    "Fortran's order": every(lambda old: plain(np.array(old.numpy(), order="F"))),
    "the other byte order": array(lambda old: plain(old.astype(">f4"))),
    "arrays are lacking, every time": report(LACKS_ARRAYS, True),
    "a side channel out of reach": report(UNREACHABLE, "no way"),
    "a request": report("kind", "mean"),
}
#: what a bad node may say of itself
DESCRIPTIONS: dict[str, Change] = {
    name: NONSENSE[name]
    for name in (
        "no records",
        "empty metrics",
        "no metrics",
        "a configuration for metrics",
        "arrays for a report",
        "configurations for all records",
        "arrays for all records",
        *(
            name
            for name in NONSENSE
            if "count " in f"{name} " or "counts" in name or "partition" in name
        ),
    )
} | {
    "no domain": metric(wire.DOMAIN, None),
    "a domain that is not a number": metric(wire.DOMAIN, float("nan")),
    "a list of domains": metric(wire.DOMAIN, [1, 2]),
    "no report": record(wire.REPORT, None),
    "BN entries that are numbers": report(wire.BN_ENTRIES, [1, 2]),
    "BN entries as a text": report(wire.BN_ENTRIES, "all"),
    "parameters that are bytes": report(wire.PARAMETERS, [b"\xff"]),
}


class BadNode(Faulty):
    """A grid in which one node's replies to messages of some kinds are nonsense."""

    change: Change = staticmethod(lambda content: None)
    describes: bool = False

    def is_spoiled(self, message: Message) -> bool:
        """Return whether the node answers a message with nonsense."""
        is_description = message.metadata.message_type == wire.DESCRIBE
        return message.metadata.dst_node_id == BAD and is_description == self.describes

    def spoiled(self, message: Message, reply: Message) -> Message:
        """Return nonsense in the place of a reply."""
        if reply.has_content():
            content = RecordDict(dict(reply.content))
            type(self).change(content)
            reply = Message(content, reply_to=message)
            identify(reply)
        return reply


class AbsentNode(BadNode):
    """A grid in which one node fails in the place of sending nonsense."""

    def spoiled(self, message: Message, reply: Message) -> Message:
        """Return an error."""
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "absent"), reply_to=message)


def sends(change_of: Change, describes_itself: bool = False) -> type[BadNode]:
    """Return a grid in which one node's replies, or its description, are changed."""

    class Grid(BadNode):
        change, describes = staticmethod(change_of), describes_itself

    return Grid
