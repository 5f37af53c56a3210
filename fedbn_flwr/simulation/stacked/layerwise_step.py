"""A layer-wise step of stacked clients: at each exchange all of them speak at once, and nothing is packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flwr.app import Message

from fedbn_flwr import wire
from fedbn_flwr.client import Metrics, Reply
from fedbn_flwr.client.layerwise_step import say
from fedbn_flwr.layerwise import Answer, Done, Exchange, OrderError, Request, SuspendedStep


@dataclass(frozen=True)
class Speaker:
    """Who takes part in a step, in the order of the messages that opened it."""

    partition: int
    num_examples: int
    obeyed: list[str]

    def reply(self, request: Request) -> Reply:
        """What it would reply to a message at an exchange."""
        metrics: Metrics = {wire.PARTITION_ID: self.partition}
        return say(Reply(self.num_examples, metrics, report={wire.OBEYED: self.obeyed}), [request])


class CohortStep:
    """The layer-wise step of some nodes, which the strategy takes from exchange to exchange.

    `advance` gives what every node says at the next exchange, nothing at the end, where `replies` are to be had.
    Strategies with layer-wise steps use it in place of messages where a grid offers it (`open_step`), and go back to
    messages if it raises.
    """

    def __init__(
        self,
        groups: Sequence["StackedStep"],
        speakers: Sequence[Speaker],
        close: Callable[[dict[int, Reply]], list[Message]],
    ) -> None:
        self._groups, self.speakers, self._close = groups, speakers, close
        self._replies: dict[int, Reply] = {}

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Go on with what all nodes together said; the first call takes no answer."""
        outcomes = [(group, group.advance(answer)) for group in self._groups]
        requests = dict[int, Request]()
        for group, outcome in outcomes:
            if isinstance(outcome, Done):
                self._replies |= dict(zip(group.places, outcome.result, strict=True))
            else:
                rows = zip(group.places, outcome.tensor.unbind(), strict=True)
                requests |= {place: replace(outcome, tensor=row) for place, row in rows}
        if requests and self._replies:
            raise OrderError(min(requests), "is at a BN layer where others are at their end")
        return [requests[place] for place in sorted(requests)]

    def replies(self) -> list[Message]:
        """What the nodes reply at the end."""
        return self._close(self._replies)

    def abandon(self) -> None:
        """Forget it: no node's memory has changed."""
        for group in self._groups:
            group.abandon()


class StackedStep(SuspendedStep[list[Reply]]):
    """The part of stacked clients, at these places of the push."""

    def __init__(self, places: Sequence[int], train: Callable[[Exchange], list[Reply]]) -> None:
        self.places = places
        super().__init__(train, seed=0)
