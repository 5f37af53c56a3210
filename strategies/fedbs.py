"""FedBS."""

from collections.abc import Sequence
from logging import INFO, WARNING
from typing import Annotated, Any

import numpy as np
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@register_strategy("fedbs")
class FedBS(FedAvg):
    """Weigh clients by their training loss until the losses agree, then weigh them equally and add a proximal term.

    Idrissi et al., FedBS: Learning on Non-IID Data in Federated Learning using Batch Normalization, ICTAI 2021.

        stage 1:  p_k = F_k / sum F          while std(F_1 ... F_K) > eps
        stage 2:  p_k = 1 / K, FedProx(mu)   from the round after `patience_rounds` consecutive ones at or below eps

    F_k is the client's mean training loss over the round, std the population's. The paper's Algorithm 1 has no
    number of consecutive rounds and a strict "<"; its text has both as here. With equal losses this is FedAvg with
    uniform weights. A loss that is negative or not finite cannot be a weight: the client has none, as with a loss of
    0, which is logged; if no client has one, all count equally.
    """

    def __init__(
        self,
        *,
        epsilon: Annotated[float, "losses agree when their standard deviation is at or below this"] = 0.1,
        patience_rounds: Annotated[int, "consecutive rounds in which losses agree before stage 2"] = 5,
        mu: Annotated[float, "weight of the proximal term"] = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if epsilon < 0 or mu < 0 or patience_rounds < 1:
            raise ValueError(
                f"epsilon and mu must not be negative and patience_rounds at least 1, got {epsilon}, {mu}, "
                f"{patience_rounds}"
            )
        self.epsilon, self.patience_rounds, self.mu = epsilon, patience_rounds, mu
        self.stage = 1
        self._calm_rounds = 0

    def instruct(self, instruction: Instruction) -> Instruction:
        """Add the proximal term in stage 2."""
        asked = super().instruct(instruction)
        return asked.with_rule(proximal_mu=self.mu) if self.stage == 2 else asked

    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Losses in stage 1, ones in stage 2; also watches for the change from one to the other."""
        if self.stage == 2:
            self.measured["fedbs-stage"] = 2
            return [1.0] * len(replies)
        losses = [_usable_loss(reply) for reply in replies]
        usable = [loss for loss in losses if loss is not None]
        deviation = float(np.std(usable)) if usable else float("inf")
        self.measured |= {"fedbs-stage": 1, "loss-deviation": deviation}
        self._calm_rounds = self._calm_rounds + 1 if deviation <= self.epsilon else 0
        if self._calm_rounds >= self.patience_rounds:
            self.stage = 2
            log(INFO, "FedBS: stage 2 begins after round %d", self.server_round)
        weights = [loss or 0.0 for loss in losses]
        if any(weights):
            return weights
        log(WARNING, "FedBS: no loss of this round is above 0, so all clients count equally")
        return [1.0] * len(replies)


def _usable_loss(reply: NodeReply) -> float | None:
    loss = reply.metrics.get(wire.TRAIN_LOSS)
    usable = float(loss) if isinstance(loss, int | float) and np.isfinite(loss) and loss >= 0 else None
    if not usable:
        log(WARNING, "FedBS: node %d reports the loss %r, so it has no weight in this round", reply.node, loss)
    return usable
