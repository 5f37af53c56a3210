"""The layer-wise step of nodes that are reached by Flower's messages: one message a node and exchange.

The client's half is `fedbn_flwr.client.layerwise_step`.
"""

from collections.abc import Sequence

from flwr.app import Message

from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.server.layerwise_attempt import Broadcast, LayerwiseAttempt
from fedbn_flwr.wire.layerwise import Content, StepPosition, pack_answers
from fedbn_flwr.wire.layerwise_grid import Participant


class MessageStep:
    """A `NodesStep` over messages, in one attempt of a round.

    `advance` raises NodesFailedError if nodes fail, are late, or send what cannot be combined. A node that fails only
    in the last exchange has no final reply, and the step ends without the node.
    """

    def __init__(self, attempt: LayerwiseAttempt) -> None:
        self._attempt = attempt
        #: by their number, as they travel
        self._answers: dict[str, Answer] = {}
        self._replies: list[Message] = []

    @property
    def participants(self) -> Sequence[Participant]:
        """Return the nodes, once the first requests are there."""
        return self._attempt.participants

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Send every node the answer, and return the nodes' next requests."""
        if answer is not None:
            self._answers[str(len(self._answers))] = answer
        replies = self._attempt.ask(self._broadcast())
        if self._attempt.is_at_end(replies):
            self._replies = self._attempt.final_replies(replies)
            return None
        return self._attempt.read_requests(replies)

    def replies(self) -> list[Message]:
        """Return the nodes' final replies."""
        return self._replies

    def abandon(self) -> None:
        """Let nodes forget the step."""
        self._attempt.abandon()

    def _broadcast(self) -> Broadcast:
        position = StepPosition("exchange", self._attempt.attempt, len(self._answers))
        latest = self._pack(list(self._answers)[-1:])
        # all answers are packed only if some node lacks them
        return Broadcast(position, latest, lambda: self._pack(self._answers))

    def _pack(self, numbers: Sequence[str] | dict[str, Answer]) -> Content:
        answers = {number: self._answers[number] for number in numbers}
        return pack_answers(answers) if answers else {}
