"""Telling that training has diverged."""

from collections.abc import Sequence
from math import isfinite

from fedbn_flwr import wire
from fedbn_flwr.layerwise import NOT_FINITE, TOO_LARGE
from fedbn_flwr.server.replies import CannotTrainError, NodeReply

#: rounds without a usable reply that end a run
LOST_ROUNDS = 3


class DivergedError(CannotTrainError):
    """Training has diverged; `server_round` is the first round in which nothing was learned."""

    def __init__(self, server_round: int, reason: str) -> None:
        super().__init__(f"training diverged at round {server_round}: {reason}")
        self.server_round = server_round


class LostRounds:
    """The rounds since the last usable reply in which nodes sent numbers that are not finite.

    Rounds in which nodes only failed, or were silent, say nothing about the model, and do not count.
    """

    def __init__(self) -> None:
        self._rounds: list[int] = []
        self._nodes: set[int] = set()

    def forget(self) -> None:
        """Start again, after a round with a usable reply."""
        self._rounds, self._nodes = [], set()

    def add(
        self, server_round: int, drawn: Sequence[int], connected: int, reasons: Sequence[str], circumstances: str
    ) -> None:
        """Note a lost round; raise DivergedError if these are `LOST_ROUNDS`, and not those of one bad node.

        `reasons` say why nodes' replies could not be used.
        """
        if not (infinite := infinite_ones(reasons)):
            return
        self._rounds.append(server_round)
        self._nodes |= set(drawn)
        if len(self._rounds) >= LOST_ROUNDS and len(self._nodes) >= min(connected, 2):
            reason = f"no node has had a usable reply since ({infinite[0]}); {circumstances}"
            raise DivergedError(self._rounds[0], reason)


def infinite_ones(reasons: Sequence[str]) -> list[str]:
    """Return the reasons that speak of numbers which are not finite, or would not be if they were pooled."""
    return [reason for reason in reasons if NOT_FINITE in reason or TOO_LARGE in reason]


def refuse_infinite_loss(server_round: int, replies: Sequence[NodeReply], circumstances: str) -> None:
    """Raise DivergedError if no node that reports a training loss has a finite one."""
    losses = [loss for reply in replies if isinstance(loss := reply.metrics.get(wire.TRAIN_LOSS), float)]
    if losses and not any(map(isfinite, losses)):
        raise DivergedError(server_round, f"no node's training loss is finite; {circumstances}")
