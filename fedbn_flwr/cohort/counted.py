"""Counting what a cohort's layer-wise step does not need to send."""

from collections.abc import Sequence

from flwr.app import Message, RecordDict

from fedbn_flwr import turns
from fedbn_flwr.accounting import CountingGrid
from fedbn_flwr.clientapp import pack
from fedbn_flwr.cohort.steps import CohortStep
from fedbn_flwr.inprocess import identify
from fedbn_flwr.layerwise import Answer, Request
from fedbn_flwr.turns import Turn


class CountedStep:
    """A layer-wise step of a cohort, counted as if every exchange had taken a message to and from each node."""

    def __init__(self, step: CohortStep, grid: CountingGrid, messages: Sequence[Message]) -> None:
        self._step, self._grid, self._messages = step, grid, messages
        self.speakers, self._asked = step.speakers, 0

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Pass on and count."""
        sent = self._messages if answer is None else [self._telling(message, answer) for message in self._messages]
        self._asked += 1
        said = self._step.advance(answer)
        self._grid.count_exchange(sent, [])
        replies = []
        for speaker, request, message in zip(self.speakers, said, sent, strict=bool(said)):
            identify(message)
            replies.append(pack(speaker.reply(request), message))
            identify(replies[-1])
        self._grid.count_exchange([], replies)
        return said

    def replies(self) -> list[Message]:
        """Pass on and count."""
        replies = self._step.replies()
        self._grid.count_exchange([], replies)
        return replies

    def abandon(self) -> None:
        """Pass on."""
        self._step.abandon()

    def _telling(self, message: Message, answer: Answer) -> Message:
        turn = Turn("exchange", Turn.of(message.content).attempt, self._asked)
        news = turns.pack_answers(turns.ANSWERS, {str(self._asked - 1): answer})
        content = RecordDict({**message.content.config_records, **turn.pack(), **news})
        return Message(content, message.metadata.dst_node_id, message.metadata.message_type)
