"""FBN, both halves."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from fedbn_flwr.client.rules import Rule, Session, register_rule
from fedbn_flwr.client.rules.dynamics import BatchStatistics
from fedbn_flwr.norm.detect import bn_layers, keeps_statistics
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.pooling import Pooled, PooledGroup, Sent
from fedbn_flwr.state import Arrays
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.packed_moments import under_all_names

from .fedavg import FedAvg
from .registry import register_strategy

#: what nodes send of their mini-batches: by layer, the means of x and of x^2
BATCH_MOMENTS = "batch-moments"


@register_strategy("fbn")
class FBN(FedAvg):
    """BN that normalizes with global statistics, as constants in a round, which move from round to
    round.

    Guerraoui et al., Overcoming the Challenges of Batch Normalization in Federated Learning,
    arXiv:2405.14670, as in the public code of HBN's authors (Chen et al., ICML 2025), which
    compares with it:

        client:  h' = gamma (h - mu) / sqrt(var + eps) + beta,   mu and var received;
                 m_k, v_k: of its mini-batches
        server:  m = sum p_k m_k,   v = sum p_k (v_k + (m_k - m)^2)
                 mu <- a mu + (1 - a) m,   var <- a var + (1 - a) v,   a = `average`

    A client's m_k and v_k are means over the round's mini-batches of their means and biased
    variances. Training and evaluation use the same statistics, and a round has one exchange. This
    is FixBN, frozen from the first round on, with statistics that move. Layers of which no
    parameter learns keep theirs. Deviation: the public code divides v by N - 1 samples, here by N.
    Its optimizer is `momentum=0.9` with `clip_norm=10`.
    """

    paper: ClassVar[str] = "Guerraoui et al., 2024, arXiv:2405.14670"
    sends: ClassVar[tuple[Sent, ...]] = (PooledGroup("statistics of mini-batches", BATCH_MOMENTS),)
    needs: str = "all-statistics"
    evaluated_with: ClassVar[tuple[str, ...]] = ("running",)

    def __init__(
        self,
        *,
        average: Annotated[
            float,
            "weight of the global statistics when they move towards a round's",
            Range(0, 1, "high"),
        ] = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.average = average

    def instruct(self, instruction: Instruction) -> Instruction:
        """Normalize with the global statistics, and report those of the mini-batches."""
        asked = super().instruct(instruction).with_rule(batch_moments=True)
        return replace(asked, freeze="statistics", omit="statistics")

    def update(self, pooled: Pooled) -> Arrays:
        """Update, and move the statistics."""
        state = super().update(pooled)
        seen = pooled.groups[BATCH_MOMENTS]
        for name, mean in seen.items():
            if not name.endswith("running_mean"):
                continue
            variance = name.replace("running_mean", "running_var")
            # rules in place of means may pool the two differently
            now = {name: mean, variance: np.maximum(seen[variance] - mean**2, 0)}
            for entry, value in now.items():
                moved = (
                    self.average * self.round.current[entry].astype(np.float64)
                    + (1 - self.average) * value
                )
                state[entry] = moved.astype(state[entry].dtype)
        return state


@register_rule
class BatchMoments(Rule):
    """Send the means of x and x^2 over the round's mini-batches, under the names of a layer's
    running statistics.
    """

    #: whether they are sent
    batch_moments: bool = False
    #: what its hooks see inside `torch.func.vmap` cannot be kept
    stacks: ClassVar[bool] = False

    def begin(self, session: Session) -> None:
        """Start to record."""
        self._statistics = BatchStatistics(session.model)

    def finish(self, session: Session) -> None:
        """Stop, and add the moments of the layers whose statistics move to the reply."""
        sent: dict[str, torch.Tensor] = {}
        layers = bn_layers(session.model)
        seen = self._statistics.stop()
        moving = {
            name: values for name, values in seen.items() if not keeps_statistics(layers[name])
        }
        for name, (variance, mean, *_) in under_all_names(session.model, moving):
            prefix = f"{name}." if name else ""
            # in float64, because the server takes the square of the mean away
            sent |= {f"{prefix}running_mean": mean, f"{prefix}running_var": variance + mean**2}
        session.records[BATCH_MOMENTS] = sent
