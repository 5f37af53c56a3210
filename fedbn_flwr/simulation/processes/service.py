"""What a worker does for its grid."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.data import prefetch
from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.layerwise.exchange import ExchangeError, pool_requests
from fedbn_flwr.simulation.how_trained import HowTrained
from fedbn_flwr.transports import NodesTransport, Participant, is_unable, open_step

#: makes the grid of some partitions' nodes; it is pickled, and called in the worker
GridFactory = Callable[[Sequence[int]], Grid]


@dataclass(frozen=True)
class Opened:
    """A worker's share of a step, at its first exchange."""

    #: in the order of the rows
    participants: Sequence[Participant]
    requests: Requests | None


class Service:
    """The service of a worker: what its grid asks for by name, with one payload each."""

    def __init__(self) -> None:
        #: the grid of the worker's nodes, once it is made
        self.grid: Any = None
        self._step: NodesTransport | None = None
        #: the messages that opened the step
        self._asked: Sequence[Message] = ()
        #: of the nodes in the step, where their requests are to be pooled
        self._weights: tuple[float, ...] = ()

    def open(self, payload: tuple[GridFactory, Sequence[int]]) -> None:
        """Make the grid that later requests are about."""
        make_grid, partitions = payload
        self.grid = make_grid(partitions)

    def deliver(self, messages: Sequence[Message]) -> list[Message | None]:
        """Return the answers, in the order of the messages; None where an answer is in the mean of
        several.
        """
        return _in_place(messages, self.grid.send_and_receive(messages))

    # ---- layer-wise steps, as `WorkersTransport` asks --------------------------------------------

    def open_step(self, messages: list[Message]) -> Opened | None:
        """Take this worker's nodes to the first exchange of a step; None if they cannot take it
        together.
        """
        self._step = open_step(self.grid, messages)
        self._asked = messages
        self._weights = ()
        if self._step is None:
            return None
        requests = self._advance(None)
        return Opened(self._step.participants, requests)

    def advance(self, answer: Answer) -> Requests | None:
        """Take this worker's nodes to their next exchange.

        Once the worker has their weights, it answers with one row for all of them.
        """
        self._weights = answer.weights or self._weights
        return self._advance(answer)

    def _advance(self, answer: Answer | None) -> Requests | None:
        step = self._current_step
        try:
            requests = step.advance(answer)
            if requests is None:
                return None
            if self._weights:
                requests = pool_requests(requests, self._weights)
        except ExchangeError as error:
            raise RuntimeError(
                f"node {step.participants[error.client].node}: {error.reason}"
            ) from None
        # where those of other workers are
        return replace(requests, tensor=requests.tensor.cpu())

    def replies(self, _: None) -> list[Message | None]:
        """Return the nodes' replies at the end of a step, as `deliver` does."""
        return _in_place(self._asked, self._current_step.replies())

    @property
    def _current_step(self) -> NodesTransport:
        if self._step is None:
            raise RuntimeError("it has no layer-wise step")
        return self._step

    def abandon(self, _: None) -> None:
        """Forget the step."""
        if self._step is not None:
            self._step.abandon()

    def how_trained(self, _: None) -> HowTrained:
        """Return how this worker has trained its clients."""
        how: HowTrained = self.grid.how_trained()
        return how

    def limit_stacks(self, most: int) -> None:
        """Train at most so many clients together."""
        self.grid.limit_stacks(most)

    # ---- what nodes remember ---------------------------------------------------------------------

    def context(self, node: int) -> Context:
        """Return a node's present context."""
        context: Context = self.grid.context(node)
        return context

    def remembering(self, _: None) -> list[int]:
        """Return the nodes that remember something."""
        return [context.node_id for context in self.grid.contexts()]

    def remember(self, payload: tuple[int, RecordDict]) -> None:
        """Let a node remember this, and nothing else."""
        self.grid.remember(*payload)


def _in_place(messages: Sequence[Message], replies: Iterable[Message]) -> list[Message | None]:
    """Return the replies in the places of the messages that they answer."""
    by_question = {reply.metadata.reply_to_message_id: reply for reply in replies}
    return [by_question.get(message.metadata.message_id) for message in messages]


def call(service: Service, name: str, payload: Any) -> tuple[str, Any]:
    """Return what went wrong, if anything, and the answer; of a failure, whether the worker cannot
    do this at all.
    """
    try:
        # there are as many workers as cores
        with prefetch.decoding_here():
            return "", getattr(service, name)(payload)
    except Exception as error:
        logging.getLogger("flwr").debug("A worker failed", exc_info=error)
        return f"{type(error).__name__}: {error}", is_unable(error)
