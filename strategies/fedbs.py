"""FedBS."""

from dataclasses import replace
from logging import INFO
from typing import Annotated, Any, ClassVar, Literal

from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.averaging import Arrays
from fedbn_flwr.server.replies import Group, Pooled
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.pooled import Terms

from .fedavg import FedAvg
from .registry import register_strategy

#: the metrics of the losses that can be weights
LOSSES = {"local": wire.LOCAL_LOSS, "running": wire.TRAIN_LOSS}


@register_strategy("fedbs")
class FedBS(FedAvg):
    """Weigh clients by their training loss until the losses agree, then weigh them equally and add a proximal term.

    Idrissi et al., FedBS: Learning on Non-IID Data in Federated Learning using Batch Normalization, ICTAI 2021.

        stage 1:  p_k = F_k / sum F          while std(F_1 ... F_K) > eps
        stage 2:  p_k = 1 / K, FedProx(mu)   from the round after `patience_rounds` consecutive ones at or below eps

    F_k is, with `loss="local"`, the loss on all of the client's data at the model that it sends, with that model's
    running statistics. So section I defines it, F_k(w) = (1 / n_k) sum_j f_j(w; x_j, y_j), where a sample's loss
    depends on no other sample; section IV weighs by "the loss of a local model"; and Algorithm 1 computes F_k after
    the step and returns it with w. The algorithm may also be read as the mean over the mini-batches of the round:
    `loss="running"`, which costs no pass over the data, and counts what the client did not know at first.

    std is the population's. The paper's Algorithm 1 has no number of consecutive rounds and a strict "<"; its text has
    both as here. With equal losses this is FedAvg with uniform weights. A loss that is negative or not finite cannot be
    a weight: the client has none, as with a loss of 0, which is logged; if no client has one, all count equally. The
    paper gives no `mu`; the default is one of those that FedProx's tries. Step 3 of section IV lets clients update
    "training and inference statistics" from the received ones; here as in FedAvg, mini-batches have their own.
    """

    paper: ClassVar[str] = "Idrissi et al., ICTAI 2021"
    leaves: ClassVar[str] = "everything, and the training loss"
    use: ClassVar[str] = "some clients learn much slower than others"
    pools: ClassVar[tuple[Group, ...]] = (Group("losses, by which nodes are weighted", can_be_robust=False),)
    kept: ClassVar[tuple[str, ...]] = ("stage", "_calm_rounds")

    def __init__(
        self,
        *,
        epsilon: Annotated[float, "losses agree when their standard deviation is at or below this", Range(0)] = 0.1,
        patience_rounds: Annotated[int, "consecutive rounds in which losses agree before stage 2", Range(1)] = 5,
        mu: Annotated[float, "weight of the proximal term", Range(0)] = 0.01,
        loss: Annotated[
            Literal["local", "running"],
            "losses that are weights: local (on all local data, after training) or running (of the mini-batches)",
        ] = "local",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.loss = loss
        self.epsilon, self.patience_rounds, self.mu = epsilon, patience_rounds, mu
        self.stage = 1
        self._calm_rounds = 0

    def instruct(self, instruction: Instruction) -> Instruction:
        """Ask for the local loss in stage 1, and add the proximal term in stage 2."""
        asked = super().instruct(instruction)
        if self.stage == 2:
            return asked.with_rule(proximal_mu=self.mu)
        return replace(asked, report_local_loss=self.loss == "local", later="proximal-mu")

    def terms(self) -> Terms:
        """By losses in stage 1, uniformly in stage 2."""
        return Terms("uniform" if self.stage == 2 else "tally", LOSSES[self.loss])

    def update(self, pooled: Pooled) -> Arrays:
        """Update; also watch for the change from stage 1 to stage 2."""
        self.measured["fedbs-stage"] = self.stage
        if self.stage == 1:
            self.measured["loss-deviation"] = pooled.deviation
            self._calm_rounds = self._calm_rounds + 1 if pooled.deviation <= self.epsilon else 0
            if self._calm_rounds >= self.patience_rounds:
                self.stage = 2
                log(INFO, "FedBS: stage 2 begins after round %d", self.server_round)
        return super().update(pooled)
