"""HBN."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np

from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.pooling import Pooled
from fedbn_flwr.server.round import Round
from fedbn_flwr.state import Arrays

from .partial_sharing import PartialSharing
from .registry import register_strategy


@register_strategy("hbn")
class HBN(PartialSharing):
    """Hybrid BN: train with a learned, local mix of the batch's statistics and of global ones that
    move slowly.

    Chen, Xu, Wu, Kittler, Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation
    in Federated Learning, ICML 2025, and its public code. Every round has two exchanges:

    1. nodes train with mean = (1 - s) mean_steady + s mean_batch (the variance alike), s =
       sigmoid(a), a learned and kept on the node; the server averages parameters, and moves the
       steady statistics towards those of the round's first model: steady <- `average` steady + (1 -
       `average`) gathered,
    2. nodes run `gather_samples` samples (0: all) through the new model, and the server pools
       count, mean and variance of what the layers normalized with, divided by N - 1. Evaluation
       uses these alone.

    Deviations from the public code: there, the nodes of the next round gather, with their training,
    and once more where a round is evaluated, so if all nodes take part, the numbers are the same; N
    counts values and not samples; the first round leaves the steady statistics as they are. Its
    optimizer is `momentum=0.9` with `clip_norm=10`.

    There is one global model. It must be built with `norm="hbn"`, which an experiment does by
    itself.
    """

    paper: ClassVar[str] = "Chen et al., ICML 2025, arXiv:2505.21877"
    stays: ClassVar[str] = "mix"
    personal: ClassVar[bool] = False
    needs: str = "HybridBatchNorm"
    evaluated_with: ClassVar[tuple[str, ...]] = ("exact",)

    def __init__(
        self,
        *,
        gather_samples: int = 64,
        average: Annotated[
            float,
            "weight of the steady statistics when they move towards gathered ones",
            Range(0, 1, "high"),
        ] = 0.998,
        **options: Any,
    ) -> None:
        super().__init__(gather_samples=gather_samples, **options)
        self.average = average

    @classmethod
    def own_norm(cls, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Hybrid BN."""
        return "hbn", {}

    def gathers_from(self, now: Round) -> list[int]:
        """Return the nodes that have trained, after every round."""
        return sorted(now.answered)

    def update(self, pooled: Pooled) -> Arrays:
        """Update, and move the steady statistics."""
        merged = super().update(pooled)
        for name in [
            name for name in merged if name.rpartition(".")[2] in ("steady_mean", "steady_var")
        ]:
            gathered = self.round.current[name.replace("steady_", "running_")].astype(np.float64)
            steady = self.average * self.round.current[name] + (1 - self.average) * gathered
            merged[name] = steady.astype(merged[name].dtype)
        return merged
