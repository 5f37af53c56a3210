"""Counting what a cohort's layer-wise step does not need to send."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedbn_flwr.client.layerwise_step import LastRequest
from fedbn_flwr.clientapp import pack
from fedbn_flwr.layerwise import Answer, Kind, Request
from fedbn_flwr.simulation.sequential import identify
from fedbn_flwr.simulation.stacked.layerwise_step import CohortStep, Speaker
from fedbn_flwr.traffic.sizes import Head, Sizes, empty_message, head_of, message_sizes, size_class
from fedbn_flwr.traffic.tally import Tally
from fedbn_flwr.wire import layerwise as turns
from fedbn_flwr.wire.layerwise import Turn

#: counts messages to nodes, and their replies, as one exchange
CountExchange = Callable[[Sequence[Message], Sequence[Message]], None]


class CountedStep:
    """A layer-wise step of a cohort, counted as if every exchange had taken a message to and from each node.

    How long such messages would be depends on shapes, names and the lengths of whole numbers; they are made once for
    each of these, and every later one is looked up.
    """

    def __init__(
        self, step: CohortStep, tally: Tally, count_exchange: CountExchange, messages: Sequence[Message]
    ) -> None:
        self._step, self._tally, self._count_exchange, self._messages = step, tally, count_exchange, messages
        self.speakers, self._asked = step.speakers, 0
        self._heads = [head_of(message.metadata) for message in messages]
        self._attempt, self._config = Turn.of(messages[0].content).attempt, _config_of(messages[0].content)

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Pass on and count."""
        said = self._step.advance(answer)
        if answer is None:
            self._count_exchange(self._messages, [])
        else:
            self._count_answer(answer)
        self._count_said(said)
        self._asked += 1
        return said

    def _count_answer(self, answer: Answer) -> None:
        """What brings the answer to every node."""
        place = size_class(self._attempt), size_class(self._asked), str(self._asked - 1)
        form = _Form.of(answer.tensor, answer.count)
        every = [_telling_sizes(head, self._config, *place, form) for head in self._heads]
        tally = self._tally
        tally.exchanges += 1
        tally.payload_down += sum(sizes.payload for sizes in every)
        tally.wire_down += sum(sizes.wire for sizes in every)
        # what goes to several nodes counts once
        tally.paper += every[0].paper

    def _count_said(self, said: Sequence[Request]) -> None:
        """What every node would reply."""
        tally = self._tally
        for head, speaker, request in zip(self._heads, self.speakers, said, strict=bool(said)):
            who = size_class(speaker.partition), size_class(speaker.num_examples), tuple(speaker.obeyed)
            form = _Form.of(request.tensor, request.count)
            last = isinstance(request, LastRequest)
            sizes = _saying_sizes(head, *who, last, request.kind, request.layer, form)
            tally.payload_up += sizes.payload
            tally.paper += sizes.paper
            tally.wire_up += sizes.wire

    def replies(self) -> list[Message]:
        """Pass on and count."""
        replies = self._step.replies()
        self._count_exchange([], replies)
        return replies

    def abandon(self) -> None:
        """Pass on."""
        self._step.abandon()


class _Form(NamedTuple):
    """What an exchanged tensor's length depends on, and that of its count."""

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
def _telling_sizes(head: Head, config: _Config, attempt: int, asked: int, number: str, form: _Form) -> Sizes:
    """A message that brings an answer."""
    records = {name: ConfigRecord({key: _listed(value) for key, value in values}) for name, values in config}  # type: ignore[misc]
    news = turns.pack_answers(turns.ANSWERS, {number: Answer(form.tensor(), form.number)})
    message = empty_message(head)
    message.content = RecordDict({**records, **Turn("exchange", attempt, asked).pack(), **news})
    return message_sizes(message)


@lru_cache(maxsize=8192)
def _saying_sizes(
    head: Head,
    partition: int,
    num_examples: int,
    obeyed: tuple[str, ...],
    last: bool,
    kind: Kind,
    layer: str,
    form: _Form,
) -> Sizes:
    """A node's reply at an exchange."""
    message = empty_message(head)
    identify(message)
    said = (LastRequest if last else Request)(kind, layer, form.tensor(), form.number)
    return message_sizes(pack(Speaker(partition, num_examples, list(obeyed)).reply(said), message))


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
