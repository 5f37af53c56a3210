"""The loop of a layer-wise step, and what it asks of the clients' transport."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from fedbn_flwr.layerwise.exchange import Answer, Observer, Request, respond

ReplyT = TypeVar("ReplyT")


class LayerwiseStep(Protocol[ReplyT]):
    """A layer-wise step of several clients, seen from the server; a transport implements it.

    Transports: `Lockstep` (clients of this process), `StackedLayerwiseStep` (stacked clients), `WorkersStep` (clients
    in several processes), `MessageStep` (Flower's messages), `ChannelStep` (a side channel). A step is taken once.
    """

    def advance(self, answer: Answer | None = None) -> Sequence[Request]:
        """Take every client to its next exchange, and return one request for each client.

        The first call takes no answer. Every later call brings the answer to the latest requests. Requests come in
        the same order every time. None are returned at the end of the step, where all clients are done. An exception
        says that the step cannot go on.
        """

    def replies(self) -> list[ReplyT]:
        """Return the clients' replies, after the end of the step; only now do clients remember what they did."""

    def abandon(self) -> None:
        """End the step where it is; no client remembers the step. Nothing happens after the end."""


def take_step(
    step: LayerwiseStep[ReplyT], weigh: Callable[[], Sequence[float]], observe: Observer | None = None
) -> list[ReplyT]:
    """Answer every exchange of a step for all clients at once, and return the clients' replies.

    This is the server in algorithms 2 and 3 of Wang et al. A request holds a client's mu_i and sigma_i^2 of one BN
    layer, from the first layer to the last, and then the gradients by them, from the last layer to the first. The
    answer is their sum_i p_i, equations (39) to (41).

    `weigh` returns the weights p_i in the order of the requests; it is called once the clients have sent the first.
    `observe` is called with every exchange. If anything fails, the step is abandoned.
    """
    try:
        requests = step.advance()
        weights = weigh() if requests else []
        while requests:
            if observe is not None:
                observe(requests)
            requests = step.advance(respond(requests, weights))
        return step.replies()
    except Exception:
        step.abandon()
        raise
