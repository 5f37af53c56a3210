"""FedAvg. The clients' half is `fedbn_flwr/client/training.py`: plain local steps.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
2017, algorithm 1:

    for each round t = 1, 2, ...:
        S_t <- random set of m = max(C K, 1) clients
        for each client k in S_t in parallel:
            w_k <- ClientUpdate(k, w_t):   for each local batch b:  w <- w - eta grad l(w; b)
        w_{t+1} <- sum_{k in S_t} (n_k / n) w_k,   n = sum_{k in S_t} n_k
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.server.pooling import Pooled
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.state import Arrays

from .registry import register_strategy

Weighting = Literal["examples", "uniform"]


@register_strategy("fedavg")
class FedAvg(BaseStrategy):
    r"""Federated averaging of the whole state, BN statistics included.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
    AISTATS 2017.

        w <- sum_k p_k w_k,   p_k = n_k / sum n   (`weighting="examples"`)
                              or  1 / K           (`weighting="uniform"`)

    Floating-point entries are averaged in float64 and keep their dtype; of a counter, the largest
    is taken. With one client and E steps this is plain training.
    """

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def __init__(
        self,
        *,
        weighting: Annotated[
            Weighting, "how much a client counts: examples or uniform"
        ] = "examples",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.averager.refuse_weighting(weighting)
        self.weighting = weighting

    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return n_k for each reply, or 1; of a mean of several nodes, the sum over the nodes."""
        if self.weighting == "uniform":
            return [float(len(reply.nodes)) for reply in replies]
        return [float(reply.num_examples) for reply in replies]

    def update(self, pooled: Pooled) -> Arrays:
        """Return the mean of the models; entries that nobody sent stay as they are."""
        return {**self.round.current, **pooled.model}
