"""The steps of several clients in one process, from exchange to exchange."""

from collections.abc import Sequence
from typing import TypeVar

from fedbn_flwr.layerwise.exchange import Observer, OrderError, Request, respond
from fedbn_flwr.layerwise.suspended_step import Done, Step, SuspendedStep

T = TypeVar("T")


def lockstep(
    steps: Sequence[Step[T]], weights: Sequence[float], seeds: Sequence[int], observe: Observer | None = None
) -> list[T]:
    """Run every client's step to its end, one client at a time, and answer each exchange for all of them.

    If one client fails, its error is raised and all others are abandoned.
    """
    suspended = [SuspendedStep(step, seed) for step, seed in zip(steps, seeds, strict=True)]
    try:
        outcomes = [step.advance() for step in suspended]
        while any(isinstance(outcome, Request) for outcome in outcomes):
            requests = _requests(outcomes)
            if observe is not None:
                observe([[request] for request in requests])
            answer = respond(requests, weights)
            outcomes = [step.advance(answer) for step in suspended]
        return [outcome.result for outcome in outcomes if isinstance(outcome, Done)]
    finally:
        for step in suspended:
            step.abandon()


def _requests(outcomes: Sequence[Request | Done[T]]) -> list[Request]:
    requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
    for client, outcome in enumerate(outcomes):
        if isinstance(outcome, Done):
            raise OrderError(client, f"is at its end where others are at BN layer {requests[0].layer!r}")
    return requests
