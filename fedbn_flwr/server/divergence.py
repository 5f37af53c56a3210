"""Telling that training has diverged."""

from collections.abc import Sequence
from math import isfinite

from fedbn_flwr import wire
from fedbn_flwr.server.replies import CannotTrainError, NodeReply, Refusal

#: rounds without a usable reply that end a run
LOST_ROUNDS = 3


class DivergedError(CannotTrainError):
    """Training has diverged; `server_round` is the first round in which nothing was learned."""

    def __init__(self, server_round: int, reason: str) -> None:
        super().__init__(server_round, reason)
        self.server_round, self.reason = server_round, reason

    def __str__(self) -> str:
        return f"training diverged at round {self.server_round}: {self.reason}"


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

    def add(self, server_round: int, refused: Sequence[Refusal], connected: int, circumstances: str) -> None:
        """Note a lost round; raise DivergedError if these are `LOST_ROUNDS`, of more nodes than one bad one.

        `connected` is the number of all nodes.
        """
        infinite = [refusal for refusal in refused if refusal.is_infinite]
        if not infinite:
            return
        self._rounds.append(server_round)
        self._nodes |= {refusal.node for refusal in infinite}
        if len(self._rounds) >= LOST_ROUNDS and len(self._nodes) >= min(connected, 2):
            reason = f"no node has had a usable reply since ({infinite[0]}); {circumstances}"
            raise DivergedError(self._rounds[0], reason)


def infinite_losses(replies: Sequence[NodeReply]) -> int:
    """Return how many nodes report a training loss if none of the losses is finite; 0 if one is."""
    losses = [loss for reply in replies if isinstance(loss := reply.metrics.get(wire.TRAIN_LOSS), float)]
    return 0 if any(map(isfinite, losses)) else len(losses)
