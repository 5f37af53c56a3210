"""Count the messages that a layer-wise step without messages spares."""

from collections.abc import Callable, Sequence

from flwr.app import Message

from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.traffic.tally import Tally
from fedbn_flwr.wire.layerwise_grid import NodesStep, Participant

#: counts messages to nodes, and their replies, as one exchange
CountExchange = Callable[[Sequence[Message], Sequence[Message]], None]


class CountedStep:
    """A `NodesStep`, counted as if every exchange had taken a message to and from each node.

    In such a message, the one array is the tensor of the answer or the request.
    """

    def __init__(
        self, step: NodesStep, tally: Tally, count_exchange: CountExchange, messages: Sequence[Message]
    ) -> None:
        self._step, self._tally, self._count_exchange, self._messages = step, tally, count_exchange, messages

    @property
    def participants(self) -> Sequence[Participant]:
        """Return the participants of the step."""
        return self._step.participants

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Advance the step, and count one exchange."""
        requests = self._step.advance(answer)
        if answer is None:
            self._count_exchange(self._messages, [])
        else:
            self._tally.exchanges += 1
            self._tally.payload_down += len(self._messages) * answer.tensor.nbytes
            # what goes to several nodes counts once
            self._tally.paper += answer.tensor.nbytes
        received = 0 if requests is None else requests.tensor.nbytes
        self._tally.payload_up += received
        self._tally.paper += received
        return requests

    def replies(self) -> list[Message]:
        """Return the nodes' replies, and count them."""
        replies = self._step.replies()
        self._count_exchange([], replies)
        return replies

    def abandon(self) -> None:
        """Abandon the step."""
        self._step.abandon()
