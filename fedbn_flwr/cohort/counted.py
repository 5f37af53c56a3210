"""Counting what a cohort's layer-wise step does not need to send."""

from collections.abc import Sequence

from flwr.app import Message, RecordDict

from fedbn_flwr import turns
from fedbn_flwr.accounting import CountingGrid, message_sizes
from fedbn_flwr.clientapp import pack
from fedbn_flwr.cohort.steps import CohortStep
from fedbn_flwr.inprocess import identify
from fedbn_flwr.layerwise import Answer, Request
from fedbn_flwr.turns import Turn


class CountedStep:
    """A layer-wise step of a cohort, counted as if every exchange had taken a message to and from each node.

    Tensors of a layer are of one size for all nodes, so after the first exchange one node's messages are made and count
    for all.
    """

    def __init__(self, step: CohortStep, grid: CountingGrid, messages: Sequence[Message]) -> None:
        self._step, self._grid, self._messages = step, grid, messages
        self.speakers, self._asked = step.speakers, 0
        #: by how much all nodes' messages exceed so many of the first one's: in ids and numbers of examples
        self._excess_down, self._excess_up = 0, 0

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Pass on and count."""
        said = self._step.advance(answer)
        if answer is None:
            self._count_each(said)
        else:
            self._count_first(answer, said)
        self._asked += 1
        return said

    def _count_each(self, said: Sequence[Request]) -> None:
        """The messages that begin the step, and what nodes would reply to them."""
        replies = [self._reply(place, message, said) for place, message in enumerate(self._messages)] if said else []
        self._grid.count_exchange(self._messages, replies)
        self._excess_down, self._excess_up = (
            sum(sizes) - len(sizes) * sizes[0] if sizes else 0
            for sizes in ([message_sizes(message).wire for message in part] for part in (self._messages, replies))
        )

    def _count_first(self, answer: Answer, said: Sequence[Request]) -> None:
        """What the first node would be sent and reply, times the number of nodes."""
        tally, nodes = self._grid.training, len(self._messages)
        message = self._telling(self._messages[0], answer)
        down = message_sizes(message)
        tally.exchanges += 1
        tally.payload_down += nodes * down.payload
        tally.wire_down += nodes * down.wire + self._excess_down
        tally.paper += down.paper
        if said:
            up = message_sizes(self._reply(0, message, said))
            tally.payload_up += nodes * up.payload
            tally.wire_up += nodes * up.wire + self._excess_up
            tally.paper += nodes * up.paper

    def _reply(self, place: int, message: Message, said: Sequence[Request]) -> Message:
        identify(message)
        return pack(self.speakers[place].reply(said[place]), message)

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
