"""The server's loop over the exchanges of a layer-wise step, and the transport of clients in this process."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from fedbn_flwr.layerwise.exchange import Answer, Combiner, Observer, OrderError, Requests, combine, join, respond
from fedbn_flwr.layerwise.suspended_step import Done, Step, SuspendedStep

ReplyT = TypeVar("ReplyT")


class Transport(Protocol[ReplyT]):
    """What takes one layer-wise step of several clients from exchange to exchange, seen from the server.

    `Lockstep` is the transport of clients in this process. The transports of Flower's nodes are in
    `fedbn_flwr.transports`. A transport takes one step.
    """

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take every client to its next exchange, and return the requests of all; None where all are at their end.

        The first call takes no answer. Every later call brings the answer to the latest requests. Clients have the same
        rows every time. An exception says that the step cannot go on.
        """

    def replies(self) -> list[ReplyT]:
        """Return the clients' replies, after the end of the step; only now do clients remember what they did."""

    def abandon(self) -> None:
        """End the step where it is; no client remembers the step. Nothing happens after the end."""


def take_step(
    transport: Transport[ReplyT],
    weigh: Callable[[], Sequence[float]],
    observe: Observer | None = None,
    combiner: Combiner = combine,
) -> list[ReplyT]:
    """Answer every exchange of a step for all clients at once, and return the clients' replies.

    This is the server in algorithms 2 and 3 of Wang et al. A request holds a client's mu_i and sigma_i^2 of one BN
    layer, from the first layer to the last, and then the gradients by them, from the last layer to the first. The
    answer is their sum_i p_i, equations (39) to (41). Where mean and variance come together, each variance is about the
    client's own mean, and `combine` adds the square of that mean's distance from the pooled one.

    `weigh` returns the weights p_i in the order of the rows; it is called once the clients have sent the first
    requests. Where the first answer tells workers the weights, each pools its rows, and `respond` adds pools. `observe`
    is called with every exchange. `combiner` may put a rule in the place of the weighted sums. If anything fails, the
    step is abandoned.
    """
    try:
        requests = transport.advance()
        weights = [] if requests is None else weigh()
        while requests is not None:
            if observe is not None:
                observe(requests)
            requests = transport.advance(respond(requests, weights, combiner))
        return transport.replies()
    except Exception:
        transport.abandon()
        raise


class Lockstep(Transport[ReplyT]):
    """The transport of clients in this process: stacks of clients, of which one at a time runs to its next exchange.

    A stack is a suspended step whose requests have a row for each of its clients, and whose result is a list of their
    replies. Row i of the joined batch is the client at position `order[i]` when the stacks are laid end to end.
    """

    def __init__(self, stacks: Sequence[SuspendedStep[list[ReplyT]]], order: Sequence[int] | None = None) -> None:
        self._stacks, self._order = stacks, order
        self._results: list[ReplyT] = []

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take every stack to its next exchange."""
        outcomes = [stack.advance(answer) for stack in self._stacks]
        requests = [outcome for outcome in outcomes if isinstance(outcome, Requests)]
        done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
        if requests and done:
            sizes = [len(each.counts) if isinstance(each, Requests) else len(each.result) for each in outcomes]
            position = sum(sizes[: outcomes.index(done[0])])
            client = position if self._order is None else self._order.index(position)
            raise OrderError(client, f"is at its end where others are at BN layer {requests[0].layer!r}")
        if requests:
            return join(requests, self._order)
        results = [reply for outcome in done for reply in outcome.result]
        self._results = results if self._order is None else [results[position] for position in self._order]
        return None

    def replies(self) -> list[ReplyT]:
        """Return the clients' results, in the order of the rows."""
        return self._results

    def abandon(self) -> None:
        """End every stack's step where it is."""
        for stack in self._stacks:
            stack.abandon()


def lockstep(
    steps: Sequence[Step[ReplyT]], weights: Sequence[float], seeds: Sequence[int], observe: Observer | None = None
) -> list[ReplyT]:
    """Run the steps of all clients, which meet at each exchange, and return their results.

    If one client fails, its error is raised and all others are abandoned.
    """
    stacks = [SuspendedStep(_alone(step), seed) for step, seed in zip(steps, seeds, strict=True)]
    return take_step(Lockstep(stacks), lambda: weights, observe)


def _alone(step: Step[ReplyT]) -> Step[list[ReplyT]]:
    return lambda exchange: [step(exchange)]
