"""Counting what is really sent: exchanges, payload and wire bytes, per kind of message."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.common.constant import SType
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import InflatableObject

from fedbn_flwr.arrays import array_records, data_bytes, distinct, flat_of, serialized_bytes
from fedbn_flwr.flat import Layout
from fedbn_flwr.grids import PassingGrid
from fedbn_flwr.wire import DESCRIBE


@dataclass
class Tally:
    """Numbers of one kind of traffic."""

    #: messages sent to nodes and answered, all nodes of one push counting as one exchange
    exchanges: int = 0
    #: bytes of the arrays' numbers, server to nodes and nodes to server, every node counted
    payload_down: int = 0
    payload_up: int = 0
    #: bytes of everything that Flower serializes for these messages: names, framing, configuration. (Flower sends
    #: arrays of equal content in one message once; here each one counts.)
    wire_down: int = 0
    wire_up: int = 0
    #: payload as papers count it: what goes to several nodes once, and batch counters not at all
    paper: int = 0

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    def copy(self) -> "Tally":
        """The numbers as they are now."""
        return Tally(**vars(self))

    @property
    def payload(self) -> int:
        """Both ways."""
        return self.payload_down + self.payload_up

    @property
    def wire(self) -> int:
        """Both ways."""
        return self.wire_down + self.wire_up


class CountingGrid(PassingGrid):
    """Any grid, counted. Training and evaluation are kept apart; asking nodes who they are is neither."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.training, self.evaluation = Tally(), Tally()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count and pass on."""
        messages = list(messages)
        self._count_sent(messages)
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on and count."""
        replies = list(self._grid.pull_messages(message_ids))
        self._count_received(replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Count, pass on, count."""
        messages = list(messages)
        if not messages:
            return []
        self._count_sent(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._count_received(replies)
        return replies

    def open_step(self, messages: Sequence[Message]) -> Any:
        """Pass on where the grid takes all nodes of a layer-wise step from exchange to exchange without messages."""
        from fedbn_flwr.cohort.counted import CountedStep  # the engine counts what it keeps by this module

        opening = getattr(self._grid, "open_step", None)
        step = None if opening is None else opening(messages)
        return None if step is None else CountedStep(step, self, messages)

    def count_exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        """Count what did not need to be sent as if it had been."""
        self._count_sent(list(sent))
        self._count_received(list(received))

    def _tally(self, message: Message) -> Tally:
        kind = message.metadata.message_type
        if kind == DESCRIBE:
            return Tally()
        return self.evaluation if kind.startswith("evaluate") else self.training

    def _count_sent(self, messages: list[Message]) -> None:
        if not messages:
            return
        tally = self._tally(messages[0])
        tally.exchanges += 1
        tally.paper += sum(map(payload_bytes, _sent_once(messages)))
        # the messages to several nodes share records, and each of these is measured once
        known: dict[int, Sizes] = {}
        for message in messages:
            tally, sizes = self._tally(message), message_sizes(message, known)
            tally.payload_down += sizes.payload
            tally.wire_down += sizes.wire

    def _count_received(self, replies: list[Message]) -> None:
        for message in replies:
            if message.has_content():
                tally, sizes = self._tally(message), message_sizes(message, {})
                tally.payload_up += sizes.payload
                tally.paper += sizes.paper
                tally.wire_up += sizes.wire


class Sizes(NamedTuple):
    """The bytes of a message, or of a part of one."""

    payload: int
    paper: int
    wire: int


# What Flower adds to arrays' data depends on names, types and lengths, not on values: it is measured once for each
# set of these. To serialize and hash every message, as Flower does, would take longer than to deliver it.


def message_sizes(message: Message, known: dict[int, Sizes] | None = None) -> Sizes:
    """The sum over all parts; `known` holds records' sizes, by their identity."""
    known = {} if known is None else known
    content = message.content
    payload, paper, wire = 0, 0, _head_bytes(head_of(message.metadata)) + _contents_bytes(tuple(content))
    for record in content.values():
        if (sizes := known.get(id(record))) is None:
            sizes = known[id(record)] = _record_sizes(record)
        payload, paper, wire = payload + sizes.payload, paper + sizes.paper, wire + sizes.wire
    return Sizes(payload, paper, wire)


def _record_sizes(record: ArrayRecord | ConfigRecord | MetricRecord) -> Sizes:
    if isinstance(record, ArrayRecord):
        if flat := flat_of(record):
            return _flat_sizes(flat.layout)
        parts = record.items()
        return _arrays_sizes(
            tuple([(name, array.dtype, array.shape, array.stype, data_bytes(array)) for name, array in parts])
        )
    values = tuple([(name, type(value), alike(value)) for name, value in record.items()])
    return Sizes(0, 0, _values_bytes(type(record), values))


def _sent_once(messages: list[Message]) -> list[Array]:
    """The arrays of some messages, equal ones of one name once; without whole numbers, which are counters."""
    records = {
        (group, id(record)): record for message in messages for group, record in array_records(message.content).items()
    }
    named: dict[tuple[str, str], list[Array]] = {}
    for (group, _), record in records.items():
        for name, array in record.items():
            if _is_measured(array.dtype):
                named.setdefault((group, name), []).append(array)
    return [array for arrays in named.values() for array in distinct(arrays)]


def _is_measured(dtype: str) -> bool:
    return "int" not in dtype


Head = tuple[int, int, int, int, str, float, float, str, int | None, int | None]


def head_of(metadata: Metadata) -> Head:
    """What the length of a message's head depends on; the numbers of nodes are as many as there are nodes."""
    return (
        metadata.run_id,
        alike(metadata.src_node_id),
        alike(metadata.dst_node_id),
        len(metadata.reply_to_message_id.encode()),
        metadata.group_id,
        float(metadata.created_at != 0),
        float(metadata.ttl != 0),
        metadata.message_type,
        metadata.src_task_id,
        metadata.dst_task_id,
    )


def stand_in(head: Head) -> Message:
    """An empty message with such a head."""
    run, source, destination, reply_to, group, *rest = head
    metadata = Metadata(run, "", source, destination, "0" * reply_to, group, *rest)  # type: ignore[arg-type]
    message: Message = Message(RecordDict(), metadata=metadata)  # type: ignore[call-overload]
    return message


@lru_cache(maxsize=1024)
def _head_bytes(head: Head) -> int:
    """A message but for its content. Objects refer to each other by ids of one length, whatever is in them."""
    return len(cast(InflatableObject, stand_in(head)).deflate())


@lru_cache(maxsize=1024)
def _contents_bytes(names: tuple[str, ...]) -> int:
    """The table of a message's records."""
    return len(RecordDict({name: ConfigRecord({"stands for": name}) for name in names}).deflate())


@lru_cache(maxsize=1024)
def _values_bytes(kind: type[ConfigRecord] | type[MetricRecord], values: tuple[tuple[str, type, Any], ...]) -> int:
    """A record of numbers and texts."""
    record = kind({name: list(value) if isinstance(value, tuple) else value for name, _, value in values})
    return len(record.deflate())


def alike(value: Any) -> Any:
    """One value for all that take as many bytes."""
    if isinstance(value, list):
        return tuple(map(alike, value))
    if isinstance(value, float):
        return 0.5
    if isinstance(value, int) and not isinstance(value, bool):
        # whole numbers take a byte for every seven bits
        return 1 << value.bit_length() >> 1 if value >= 0 else ~alike(~value)
    return value


@lru_cache(maxsize=1024)
def _flat_sizes(layout: Layout) -> Sizes:
    """Those of a record of a flat state: each entry in its usual order of memory."""
    return _arrays_sizes(
        tuple(
            (name, str(dtype), shape, SType.NUMPY, serialized_bytes(dtype, shape))
            for name, dtype, shape in layout.entries
        )
    )


@lru_cache(maxsize=1024)
def _arrays_sizes(parts: tuple[tuple[str, str, tuple[int, ...], str, int], ...]) -> Sizes:
    """Measured on arrays of other content: Flower lists arrays of equal content once, and at first many are alike."""
    unlike = ArrayRecord()
    for position, (name, dtype, shape, stype, length) in enumerate(parts):
        unlike[name] = Array(dtype, shape, stype, np.random.default_rng(position).bytes(length))
    chunks = [chunk for array in unlike.values() for _, chunk in array.slice_array()]
    objects: list[InflatableObject] = [unlike, *unlike.values(), *chunks]
    return Sizes(
        payload=sum(map(payload_bytes, unlike.values())),
        paper=sum(payload_bytes(array) for array in unlike.values() if _is_measured(array.dtype)),
        wire=sum(len(item.deflate()) for item in objects),
    )


def payload_bytes(array: Array) -> int:
    """The bytes of an array's numbers."""
    return prod(array.shape) * np.dtype(array.dtype).itemsize
