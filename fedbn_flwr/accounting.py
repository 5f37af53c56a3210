"""Counting what is really sent: exchanges, payload and wire bytes, per kind of message."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.run import Run

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


class CountingGrid(Grid):
    """Any grid, counted. Training and evaluation are kept apart; asking nodes who they are is neither."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.training, self.evaluation = Tally(), Tally()
        self._framing: dict[Hashable, int] = {}

    def set_run(self, run: Run) -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Pass on."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Pass on."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on."""
        return self._grid.get_node_ids()

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
        if messages:
            tally = self._tally(messages[0])
            tally.exchanges += 1
            tally.paper += sum(payload_bytes(array) for array in _distinct(messages))
        for message in messages:
            tally, (payload, wire) = self._tally(message), self._bytes(message)
            tally.payload_down += payload
            tally.wire_down += wire

    def _count_received(self, replies: list[Message]) -> None:
        for message in replies:
            if message.has_content():
                tally, (payload, wire) = self._tally(message), self._bytes(message)
                tally.payload_up += payload
                tally.paper += sum(payload_bytes(array) for array in _distinct([message]))
                tally.wire_up += wire

    def _bytes(self, message: Message) -> tuple[int, int]:
        groups = _groups(message)
        arrays = [array for record in groups.values() for array in record.values()]
        framing = _envelope_bytes(message) + sum(map(self._framing_bytes, groups.values()))
        return sum(map(payload_bytes, arrays)), sum(len(array.data) for array in arrays) + framing

    def _framing_bytes(self, record: ArrayRecord) -> int:
        """What Flower adds to the data of a group of arrays.

        It depends on their names, shapes and dtypes, not on their values, so it is measured once for each set of them:
        hashing every message, as Flower does, would cost more than sending it.
        """
        signature = tuple((name, array.shape, array.dtype) for name, array in record.items())
        if signature not in self._framing:
            self._framing[signature] = _measure_framing(record)
        return self._framing[signature]


def _groups(message: Message) -> dict[str, ArrayRecord]:
    """What `content.array_records` is, which takes its time to be kept up to date."""
    return {name: record for name, record in message.content.items() if isinstance(record, ArrayRecord)}


def _distinct(messages: list[Message]) -> list[Array]:
    """The arrays of some messages, equal ones of one name once; without whole numbers, which are counters."""
    found: dict[Hashable, Array] = {}
    for message in messages:
        for group, record in _groups(message).items():
            found |= {(group, name, array.data): array for name, array in record.items() if "int" not in array.dtype}
    return list(found.values())


def _envelope_bytes(message: Message) -> int:
    """Everything but the groups of arrays. Objects refer to each other by ids of one length, whatever is in them."""
    head: InflatableObject = Message(RecordDict(), metadata=message.metadata)  # type: ignore[call-overload]
    small = [record for record in message.content.values() if not isinstance(record, ArrayRecord)]
    return _contents_bytes(tuple(message.content)) + sum(len(item.deflate()) for item in (head, *small))


@lru_cache
def _contents_bytes(names: tuple[str, ...]) -> int:
    """The table of a message's records."""
    return len(RecordDict({name: ConfigRecord({"stands for": name}) for name in names}).deflate())


def _measure_framing(record: ArrayRecord) -> int:
    """On arrays of other content: Flower lists arrays of equal content once, and at the start many are alike."""
    unlike = ArrayRecord()
    for position, (name, array) in enumerate(record.items()):
        data = np.random.default_rng(position).bytes(len(array.data))
        unlike[name] = Array(array.dtype, array.shape, array.stype, data)
    chunks = [chunk for array in unlike.values() for _, chunk in array.slice_array()]
    objects: list[InflatableObject] = [unlike, *unlike.values(), *chunks]
    return sum(len(item.deflate()) for item in objects) - sum(len(array.data) for array in record.values())


def payload_bytes(array: Array) -> int:
    """The bytes of an array's numbers."""
    return prod(array.shape) * np.dtype(array.dtype).itemsize
