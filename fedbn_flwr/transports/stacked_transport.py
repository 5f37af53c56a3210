"""Nodes of this process, in stacks: all clients of a stack ask at once, and nothing is packed."""

from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message

from fedbn_flwr.client import Reply
from fedbn_flwr.layerwise import Answer, Lockstep, Requests, Step, SuspendedStep
from fedbn_flwr.transports.nodes_transport import Participant


class StackedTransport:
    """A `NodesTransport` of stacked nodes in this process.

    A stack is the places of its clients' messages among those that opened the step, and their training, which draws
    from streams of the clients' own. `participants` are given by place. `close` makes messages of the replies, given by
    place, and keeps what the nodes remember.
    """

    def __init__(
        self,
        stacks: Sequence[tuple[Sequence[int], Step[list[Reply]]]],
        participants: Mapping[int, Participant],
        close: Callable[[dict[int, Reply]], list[Message]],
    ) -> None:
        places = [place for stack, _ in stacks for place in stack]
        order = sorted(range(len(places)), key=lambda position: participants[places[position]])
        self._places, self._close = [places[position] for position in order], close
        self._lockstep = Lockstep([SuspendedStep(train, seed=0) for _, train in stacks], order)
        self.participants = [participants[place] for place in self._places]

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take all stacks to their next exchange."""
        return self._lockstep.advance(answer)

    def replies(self) -> list[Message]:
        """Return the nodes' replies."""
        return self._close(dict(zip(self._places, self._lockstep.replies(), strict=True)))

    def abandon(self) -> None:
        """End all stacks where they are."""
        self._lockstep.abandon()
