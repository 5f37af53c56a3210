"""FedBS."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.method_state import MethodState
from fedbn_flwr.server.pooling import Pooled, Sent
from fedbn_flwr.server.replies import CannotTrainError, NodeReply
from fedbn_flwr.state import Arrays
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy

#: the metrics of the losses that can be weights
LOSSES = {
    "local": wire.LOCAL_LOSS,
    "received": wire.RECEIVED_LOSS,
    "running": wire.TRAIN_LOSS,
}


@dataclass
class FedBSState(MethodState):
    """The stage, and the latest rounds in a row in which the losses agreed."""

    stage: int = 1
    calm_rounds: int = 0


@register_strategy("fedbs")
class FedBS(FedAvg):
    """Weigh clients by their training loss until the losses agree, then weigh them equally and add
    a proximal term.

    Idrissi et al., FedBS: Learning on Non-IID Data in Federated Learning using Batch Normalization,
    ICTAI 2021.

        stage 1:  p_k = F_k / sum F          while std(F_1 ... F_K) > eps
        stage 2:  p_k = 1 / K, FedProx(mu)   from the round after `patience_rounds` consecutive
                                             ones at or below eps

    F_k is, with `loss="local"`, the loss on all of the client's data at the model that it sends,
    with that model's running statistics. So section I defines it, F_k(w) = (1 / n_k) sum_j f_j(w;
    x_j, y_j), where a sample's loss depends on no other sample; section IV weighs by "the loss of a
    local model"; and Algorithm 1 computes F_k after the step and returns it with w. After ten local
    epochs, as in the paper, these losses agree from the first round on, so that stage 1 has
    `patience_rounds` rounds.

    With `loss="received"` it is the loss at the model that the client was sent, by which the paper
    that FedBS builds on draws clients (Cho et al.). In the paper's setting these losses differ by
    more than eps from the second round on, as section IV says of "the early rounds". The
    algorithm may also be read as the mean over the mini-batches of the round: `loss="running"`,
    which costs no pass over the data.

    std is the population's. The paper's Algorithm 1 has no number of consecutive rounds and a
    strict "<"; its text has both as here. With equal losses this is FedAvg with uniform weights. A
    loss that is negative or not finite cannot be a weight: the client has none, as with a loss of
    0, which is logged; if no client has one, all count equally. The paper gives no `mu`; the
    default is one of those that FedProx's tries. Step 3 of section IV lets clients update "training
    and inference statistics" from the received ones; here as in FedAvg, mini-batches have their
    own.
    """

    paper: ClassVar[str] = "Idrissi et al., ICTAI 2021"
    sends: ClassVar[tuple[Sent, ...]] = (
        Sent("losses, by which nodes are weighted", is_robust=False),
    )
    reads_replies: bool = True
    replaced: ClassVar[tuple[str, ...]] = ("weighting",)
    state_type: ClassVar[type[MethodState]] = FedBSState
    state: FedBSState

    def __init__(
        self,
        *,
        epsilon: Annotated[
            float, "losses agree when their standard deviation is at or below this", Range(0)
        ] = 0.1,
        patience_rounds: Annotated[
            int, "consecutive rounds in which losses agree before stage 2", Range(1)
        ] = 5,
        mu: Annotated[float, "weight of the proximal term", Range(0)] = 0.01,
        loss: Annotated[
            Literal["local", "received", "running"],
            "losses that are weights: local (on all local data, after training), received (on the "
            "same, before it) or running (of the mini-batches)",
        ] = "local",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.loss = loss
        self.epsilon = epsilon
        self.patience_rounds = patience_rounds
        self.mu = mu

    def instruct(self, instruction: Instruction) -> Instruction:
        """Ask for the local loss in stage 1, and add the proximal term in stage 2."""
        asked = super().instruct(instruction)
        if self.state.stage == 2:
            return asked.with_rule(proximal_mu=self.mu)
        report = ""
        if self.loss != "running":
            report = LOSSES[self.loss]
        return replace(asked, report_loss=report, later="proximal-mu")

    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return F_k in stage 1, and equal weights in stage 2."""
        if self.state.stage == 2:
            return [1.0] * len(replies)
        key = LOSSES[self.loss]
        weights = [_loss(reply, key) for reply in replies]
        if all(key not in reply.metrics for reply in replies):
            remedy = ""
            if key == wire.TRAIN_LOSS:
                remedy = "; name the one that holds it: ClientApp(..., loss_key=...)"
            first = replies[0]
            raise CannotTrainError(
                f"FedBS weighs by the metric {key!r}, which no node sent; node {first.node} sent "
                f"{wire.printable(', '.join(sorted(first.metrics)))}{remedy}"
            )
        for reply, weight in zip(replies, weights, strict=True):
            if not weight:
                reason = "FedBS: node %d reports the %s %r, so it has no weight in this round"
                log(WARNING, reason, reply.node, key, reply.metrics.get(key))
        if any(weights):
            return [weight or 0.0 for weight in weights]
        log(WARNING, "FedBS: no %s of this round is above 0, so all clients count equally", key)
        return [1.0] * len(replies)

    def update(self, pooled: Pooled) -> Arrays:
        """Update; also watch for the change from stage 1 to stage 2."""
        state = self.state
        measured = self.round.measured
        measured["fedbs-stage"] = state.stage
        if state.stage == 1:
            losses = [
                loss
                for reply in pooled.replies
                if (loss := _loss(reply, LOSSES[self.loss])) is not None
            ]
            deviation = measured["loss-deviation"] = float(np.std(losses)) if losses else inf
            if deviation <= self.epsilon:
                state.calm_rounds += 1
            else:
                state.calm_rounds = 0
            if state.calm_rounds >= self.patience_rounds:
                state.stage = 2
                log(INFO, "FedBS: stage 2 begins after round %d", self.round.number)
        return super().update(pooled)


def _loss(reply: NodeReply, key: str) -> float | None:
    """Return a node's loss, if it can be a weight."""
    value = reply.metrics.get(key)
    if isinstance(value, int | float) and 0 <= value < inf:
        return float(value)
    return None
