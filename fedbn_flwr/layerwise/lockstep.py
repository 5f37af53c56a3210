"""The layer-wise step of several clients in one process."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from fedbn_flwr.layerwise.exchange import Answer, Observer, OrderError, Request
from fedbn_flwr.layerwise.suspended_step import Done, Step, SuspendedStep
from fedbn_flwr.layerwise.take_step import take_step

T = TypeVar("T")


class Lockstep(Generic[T]):
    """A `LayerwiseStep` of clients in this process, one client at a time; a client's result is its reply."""

    _results: list[T]

    def __init__(self, steps: Sequence[Step[T]], seeds: Sequence[int]) -> None:
        self._clients = [SuspendedStep(step, seed) for step, seed in zip(steps, seeds, strict=True)]

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Take every client to its next exchange."""
        outcomes = [client.advance(answer) for client in self._clients]
        requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
        self._results = [outcome.result for outcome in outcomes if isinstance(outcome, Done)]
        if requests and self._results:
            client = next(client for client, outcome in enumerate(outcomes) if isinstance(outcome, Done))
            raise OrderError(client, f"is at its end where others are at BN layer {requests[0].layer!r}")
        return requests

    def replies(self) -> list[T]:
        """Return the clients' results."""
        return self._results

    def abandon(self) -> None:
        """End every client's step where it is."""
        for client in self._clients:
            client.abandon()


def lockstep(
    steps: Sequence[Step[T]], weights: Sequence[float], seeds: Sequence[int], observe: Observer | None = None
) -> list[T]:
    """Run the steps of all clients, which meet at each exchange, and return their results.

    If one client fails, its error is raised and all others are abandoned.
    """
    return take_step(Lockstep(steps, seeds), lambda: weights, observe)
