"""Counting what is really sent: exchanges, payload and wire bytes, per kind of message."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, Message, RecordDict
from flwr.serverapp import Grid
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

    def _tally(self, message: Message) -> Tally:
        kind = message.metadata.message_type
        if kind == DESCRIBE:
            return Tally()
        return self.evaluation if kind.startswith("evaluate") else self.training

    def _count_sent(self, messages: list[Message]) -> None:
        if messages:
            self._tally(messages[0]).exchanges += 1
        for message in messages:
            tally, (payload, wire) = self._tally(message), self._bytes(message)
            tally.payload_down += payload
            tally.wire_down += wire

    def _count_received(self, replies: list[Message]) -> None:
        for message in replies:
            if message.has_content():
                tally, (payload, wire) = self._tally(message), self._bytes(message)
                tally.payload_up += payload
                tally.wire_up += wire

    def _bytes(self, message: Message) -> tuple[int, int]:
        arrays = [
            (group, name, array)
            for group, record in message.content.array_records.items()
            for name, array in record.items()
        ]
        payload = sum(payload_bytes(array) for _, _, array in arrays)
        return payload, sum(len(array.data) for _, _, array in arrays) + self._framing_bytes(message, arrays)

    def _framing_bytes(self, message: Message, arrays: list[tuple[str, str, Array]]) -> int:
        """What Flower adds to the arrays' data.

        It depends on the arrays' names and shapes, not on their values, so it is measured once for each set of them:
        serializing every message a second time would cost more than sending it.
        """
        small = message.content.config_records, message.content.metric_records
        shape = tuple((group, name, array.shape, array.dtype) for group, name, array in arrays)
        signature = (message.metadata.message_type, shape, len(str(small)) // 64)
        if signature not in self._framing:
            records = message.content.values()
            chunks = [chunk for _, _, array in arrays for _, chunk in array.slice_array()]
            objects = [message, message.content, *records, *(array for _, _, array in arrays), *chunks]
            total = sum(len(item.deflate()) for item in objects)
            self._framing[signature] = total - sum(len(array.data) for _, _, array in arrays)
        return self._framing[signature]


def payload_bytes(array: Array) -> int:
    """The bytes of an array's numbers."""
    return int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
