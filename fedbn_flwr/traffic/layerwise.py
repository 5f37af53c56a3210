"""Counting the messages that a layer-wise step without messages spares."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client import Reply, obeyed_keys, read_instruction
from fedbn_flwr.client.layerwise_step import report_requests
from fedbn_flwr.clientapp import pack
from fedbn_flwr.layerwise import Answer, Kind, Request
from fedbn_flwr.simulation.sequential import identify
from fedbn_flwr.traffic.sizes import Head, Sizes, empty_message, head_of, message_sizes, size_class
from fedbn_flwr.traffic.tally import Tally
from fedbn_flwr.wire.layerwise import ANSWERS, StepPosition, pack_answers
from fedbn_flwr.wire.layerwise_grid import FramedStep, NodesStep, Participant

#: counts messages to nodes, and their replies, as one exchange
CountExchange = Callable[[Sequence[Message], Sequence[Message]], None]


class CountedStep:
    """A `NodesStep`, counted as if every exchange had taken a message to and from each node.

    Bytes on the wire are those of the frames instead, if exchanges travel in frames.

    The length of such a message depends on shapes, names and the lengths of whole numbers. One message is made for each
    of these, and its length is looked up afterwards.
    """

    def __init__(
        self, step: NodesStep, tally: Tally, count_exchange: CountExchange, messages: Sequence[Message]
    ) -> None:
        self._step, self._tally, self._count_exchange, self._messages = step, tally, count_exchange, messages
        self._heads = {message.metadata.dst_node_id: head_of(message.metadata) for message in messages}
        self._receivers = Counter(self._heads.values())
        content: Any = messages[0].content
        self._attempt, self._config = StepPosition.of(content).attempt, _config_of(content)
        self._obeyed = tuple(obeyed_keys(read_instruction(content[wire.CONFIG])))
        self._exchanges = 0
        #: the nodes in the order of their requests: head, and the lengths of what they say of themselves
        self._senders: list[tuple[Head, int, int]] = []
        #: without one, what travels at an exchange would be Flower's messages
        self._framed = step if isinstance(step, FramedStep) else None

    @property
    def participants(self) -> Sequence[Participant]:
        """Return the participants of the step."""
        return self._step.participants

    def advance(self, answer: Answer | None = None) -> Sequence[Request]:
        """Advance the step, and count one exchange."""
        requests = self._step.advance(answer)
        if answer is None:
            self._count_exchange(self._messages, [])
        else:
            self._count_answer(answer)
        self._count_requests(requests)
        if self._framed is not None:
            down, up = self._framed.take_traffic()
            self._tally.wire_down += down
            self._tally.wire_up += up
        self._exchanges += 1
        return requests

    def _count_answer(self, answer: Answer) -> None:
        """Count the messages that bring an answer to every node."""
        place = size_class(self._attempt), size_class(self._exchanges), str(self._exchanges - 1)
        form = _Form.of(answer.tensor, answer.count)
        tally = self._tally
        tally.exchanges += 1
        for head, nodes in self._receivers.items():
            sizes = _answer_sizes(head, self._config, *place, form)
            tally.payload_down += nodes * sizes.payload
            tally.wire_down += nodes * sizes.wire if self._framed is None else 0
        # what goes to several nodes counts once, and has one length for all of them
        tally.paper += sizes.paper

    def _count_requests(self, requests: Sequence[Request]) -> None:
        """Count the replies that bring the requests of every node; there are none at the end."""
        tally = self._tally
        if not self._senders:
            self._senders = [
                (self._heads[each.node], size_class(each.partition), size_class(each.num_examples))
                for each in self.participants
            ]
        for sender, request in zip(self._senders, requests, strict=bool(requests)):
            form = _Form.of(request.tensor, request.count)
            sizes = _request_sizes(*sender, self._obeyed, request.kind, request.layer, form)
            tally.payload_up += sizes.payload
            tally.paper += sizes.paper
            tally.wire_up += sizes.wire if self._framed is None else 0

    def replies(self) -> list[Message]:
        """Return the nodes' replies, and count them."""
        replies = self._step.replies()
        self._count_exchange([], replies)
        return replies

    def abandon(self) -> None:
        """Abandon the step."""
        self._step.abandon()


class _Form(NamedTuple):
    """The properties that decide the length of an exchanged tensor, and the length of its count."""

    shape: torch.Size
    dtype: torch.dtype
    number: int

    @classmethod
    def of(cls, tensor: Tensor, count: int) -> "_Form":
        return cls(tensor.shape, tensor.dtype, size_class(count))

    def tensor(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)


#: what goes with every message of a step: by record and name, a value for all that are as long
_Config = tuple[tuple[str, tuple[tuple[str, object], ...]], ...]


def _config_of(content: RecordDict) -> _Config:
    return tuple(
        (name, tuple((key, size_class(value)) for key, value in record.items()))
        for name, record in content.config_records.items()
    )


@lru_cache(maxsize=8192)
def _answer_sizes(head: Head, config: _Config, attempt: int, asked: int, number: str, form: _Form) -> Sizes:
    """Return the sizes of a message that brings an answer."""
    records = {name: ConfigRecord({key: _listed(value) for key, value in values}) for name, values in config}  # type: ignore[misc]
    answers = pack_answers(ANSWERS, {number: Answer(form.tensor(), form.number)})
    message = empty_message(head)
    message.content = RecordDict({**records, **StepPosition("exchange", attempt, asked).pack(), **answers})
    return message_sizes(message)


@lru_cache(maxsize=8192)
def _request_sizes(
    head: Head, partition: int, num_examples: int, obeyed: tuple[str, ...], kind: Kind, layer: str, form: _Form
) -> Sizes:
    """Return the sizes of a node's reply at an exchange."""
    message = empty_message(head)
    identify(message)
    reply = Reply(num_examples, {wire.PARTITION_ID: partition}, report={wire.OBEYED: list(obeyed)})
    request = Request(kind, layer, form.tensor(), form.number)
    return message_sizes(pack(report_requests(reply, [request]), message))


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
