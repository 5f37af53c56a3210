"""Count the exchanges of a run, and the bytes of the arrays in them."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.layerwise import Answer, Requests, Transport
from fedbn_flwr.layerwise.steps import Exchanged, Weigh
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.state.flat import Layout
from fedbn_flwr.state.records import array_records, flat_of, payload_bytes, view_array
from fedbn_flwr.transports import NodesFailedError, NodesTransport, Participant, open_step
from fedbn_flwr.wire import DESCRIBE
from fedbn_flwr.wire.pooled import Summed

#: the bytes of a megabyte, wherever results show one
MEGABYTE = 10**6


@dataclass
class Traffic:
    """Numbers of one kind of exchange: of training, or of evaluation."""

    #: messages sent to nodes and answered, all nodes of one push counting as one exchange
    exchanges: int = 0
    #: bytes of the arrays' numbers, server to nodes and nodes to server, every node counted
    payload_down: int = 0
    payload_up: int = 0
    #: payload as papers count it: what goes to several nodes once, and batch counters not at all
    paper: int = 0

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            *(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__)
        )

    def copy(self) -> "Traffic":
        """The numbers as they are now."""
        return Traffic(**vars(self))

    @property
    def payload(self) -> int:
        """Bytes in both directions."""
        return self.payload_down + self.payload_up


class CountedTransport(Transport[Message]):
    """A `NodesTransport`, counted as if every exchange had taken a message to and from each node.

    In such a message, the one array is the tensor of the answer or the request.
    """

    def __init__(
        self, transport: NodesTransport, grid: "CountingGrid", messages: Sequence[Message]
    ) -> None:
        self._transport = transport
        self._grid = grid
        self._messages = messages
        self._traffic = grid.training
        self._before = grid.training.copy()

    @property
    def participants(self) -> Sequence[Participant]:
        """Return the participants of the step."""
        return self._transport.participants

    def take_at_once(self, weigh: Weigh) -> Sequence[Exchanged] | None:
        """Take the step where nobody is asked, and count the exchanges that are spared."""
        exchanges = self._transport.take_at_once(weigh)
        if exchanges is None:
            return None
        self._grid.outgoing(list(self._messages))
        for each in exchanges:
            self._count_answer(each.answer)
            self._count_requests(len(self._messages) * each.request)
        return exchanges

    def _count_answer(self, size: int) -> None:
        self._traffic.exchanges += 1
        self._traffic.payload_down += len(self._messages) * size
        # what goes to several nodes counts once
        self._traffic.paper += size

    def _count_requests(self, size: int) -> None:
        self._traffic.payload_up += size
        self._traffic.paper += size

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Advance the step, and count one exchange."""
        requests = self._transport.advance(answer)
        if answer is None:
            self._grid.outgoing(list(self._messages))
        else:
            self._count_answer(answer.tensor.nbytes)
        # a row each, whichever workers have pooled
        if requests is not None:
            row = requests.tensor[0].numel() * requests.dtype.itemsize
            self._count_requests(requests.clients * row)
        return requests

    def replies(self) -> list[Message]:
        """Return the nodes' replies, and count them."""
        replies = self._transport.replies()
        self._grid.incoming(replies)
        return replies

    def abandon(self) -> None:
        """Abandon the step, and count nothing of it, as it is taken by messages.

        An attempt that nodes fail counts.
        """
        if not isinstance(sys.exception(), NodesFailedError):
            vars(self._traffic).update(vars(self._before))
        self._transport.abandon()


class CountingGrid(PassingGrid):
    """Any grid, counted. Training and evaluation are kept apart.

    Asking nodes who they are is neither: a run that is resumed does it again.
    """

    def __init__(
        self, grid: Grid, training: Traffic | None = None, evaluation: Traffic | None = None
    ) -> None:
        """Count into these, or from 0."""
        super().__init__(grid)
        self.training = training or Traffic()
        self.evaluation = evaluation or Traffic()

    def open_step(self, messages: Sequence[Message]) -> CountedTransport | None:
        """Open a layer-wise step that is counted, where the grid offers steps without messages."""
        step = open_step(self._grid, messages)
        if step is None:
            return None
        return CountedTransport(step, self, messages)

    def _traffic_of(self, message: Message) -> Traffic:
        kind = message.metadata.message_type
        if kind == DESCRIBE:
            return Traffic()
        if kind.startswith("evaluate"):
            return self.evaluation
        return self.training

    def outgoing(self, messages: list[Message]) -> list[Message]:
        """Count messages."""
        if messages:
            traffic = self._traffic_of(messages[0])
            traffic.exchanges += 1
            traffic.paper += paper_bytes(messages)
        for message in messages:
            self._traffic_of(message).payload_down += message_sizes(message).payload
        return messages

    def incoming(self, replies: list[Message]) -> list[Message]:
        """Count replies."""
        for message in replies:
            if message.has_content():
                traffic = self._traffic_of(message)
                sizes = message_sizes(message)
                # a mean of several replies counts as if each had come
                nodes = 1
                if isinstance(message.content, Summed):
                    nodes = len(message.content.nodes)
                traffic.payload_up += nodes * sizes.payload
                traffic.paper += nodes * sizes.paper
        return replies


class Sizes(NamedTuple):
    """The bytes of arrays: of all, and of those that papers count."""

    payload: int
    paper: int


def message_sizes(message: Message) -> Sizes:
    """Return the bytes of all arrays of a message."""
    sizes = [_record_sizes(record) for record in array_records(message.content).values()]
    return Sizes(sum(each.payload for each in sizes), sum(each.paper for each in sizes))


def _record_sizes(record: ArrayRecord) -> Sizes:
    flat = flat_of(record)
    if flat is not None:
        return _flat_sizes(flat.layout)
    return _sum_sizes((payload_bytes(array), array.dtype) for array in record.values())


@lru_cache(maxsize=1024)
def _flat_sizes(layout: Layout) -> Sizes:
    return _sum_sizes(
        (prod(shape) * dtype.itemsize, str(dtype)) for _, dtype, shape in layout.entries
    )


def _sum_sizes(arrays: Iterable[tuple[int, str]]) -> Sizes:
    sizes = list(arrays)
    return Sizes(
        sum(size for size, _ in sizes), sum(size for size, dtype in sizes if _is_measured(dtype))
    )


def paper_bytes(messages: Sequence[Message]) -> int:
    """Return the bytes that papers count of what a server sends: equal arrays of one name once, and
    no counters.
    """
    groups: dict[str, dict[int, ArrayRecord]] = {}
    for message in messages:
        for group, record in array_records(message.content).items():
            groups.setdefault(group, {})[id(flat_of(record) or record)] = record
    return sum(_distinct_bytes(list(records.values())) for records in groups.values())


def _distinct_bytes(records: Sequence[ArrayRecord]) -> int:
    if len(records) == 1:
        return _record_sizes(records[0]).paper
    states = []
    for record in records:
        states.append(
            flat_of(record) or {name: view_array(array) for name, array in record.items()}
        )
    total = 0
    for name in {name for state in states for name in state}:
        values = [state[name] for state in states if name in state]
        different = {(value.dtype, value.shape, value.tobytes()): value for value in values}
        total += sum(value.nbytes for value in different.values() if _is_measured(str(value.dtype)))
    return total


def _is_measured(dtype: str) -> bool:
    return "int" not in dtype
