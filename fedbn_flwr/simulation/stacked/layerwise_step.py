"""The layer-wise step of stacked clients: all clients of a stack ask at once, and nothing is packed."""

from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message

from fedbn_flwr.client import Reply
from fedbn_flwr.layerwise import Answer, Done, Exchange, OrderError, Request, SuspendedStep
from fedbn_flwr.wire.layerwise_grid import Participant


class StackedLayerwiseStep:
    """A layer-wise step of some nodes, in stacks (a `NodesStep`).

    `participants` are given by the place of a node's message among those that opened the step, which is also how
    stacks name their clients. `close` makes messages of the replies, and keeps what the nodes remember.
    """

    def __init__(
        self,
        stacks: Sequence["SuspendedStack"],
        participants: Mapping[int, Participant],
        close: Callable[[dict[int, Reply]], list[Message]],
    ) -> None:
        self._stacks, self._close = stacks, close
        self._places = sorted(participants, key=participants.__getitem__)
        self.participants = [participants[place] for place in self._places]
        self._replies: dict[int, Reply] = {}

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Take all stacks to their next exchange."""
        requests: dict[int, Request] = {}
        for stack in self._stacks:
            outcome = stack.advance(answer)
            if isinstance(outcome, Done):
                self._replies |= dict(zip(stack.places, outcome.result, strict=True))
            else:
                for place, row in zip(stack.places, outcome.tensor.unbind(), strict=True):
                    requests[place] = Request(outcome.kind, outcome.layer, row, outcome.count)
        if requests and self._replies:
            client = next(client for client, place in enumerate(self._places) if place in requests)
            raise OrderError(client, "is at a BN layer where others are at their end")
        return [requests[place] for place in self._places if requests]

    def replies(self) -> list[Message]:
        """Return the nodes' replies."""
        return self._close(self._replies)

    def abandon(self) -> None:
        """End all stacks where they are."""
        for stack in self._stacks:
            stack.abandon()


class SuspendedStack(SuspendedStep[list[Reply]]):
    """The training of one stack of clients, which are at these places among all clients of the step."""

    def __init__(self, places: Sequence[int], train: Callable[[Exchange], list[Reply]]) -> None:
        self.places = places
        super().__init__(train, seed=0)
