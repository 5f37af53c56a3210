"""FedDNA: FedTAN's forward pass (Algorithm 2) without its backward pass; see `strategies/fedtan.py`."""

from collections.abc import Mapping
from typing import ClassVar

from .fedtan import FedTAN
from .registry import register_strategy


@register_strategy("feddna")
class FedDNA(FedTAN):
    """BN statistics, but not their gradients, are those of all clients' mini-batches in the first local step.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 6: FedAvg + algorithm 2,
    their simplified form of FedDNA (Duan et al., FedDNA: Federated Learning with Decoupled Normalization-Layer
    Aggregation for Non-IID Data, ECML PKDD 2021).

        forward, each layer:   mean = sum_i p_i mean_i,   variance = sum_i p_i variance_i

    where variance_i is about the pooled mean. Backward, each client goes on with its own dF_i/dmean and
    dF_i/dvariance. `exchange="paper"` asks for one after the other, as algorithm 2: 2L + 1 exchanges a round; `fused`,
    the default, for both at once: L + 1, the same numbers. With one client this is FedAvg.

    `carry=True` uses corrections from earlier rounds instead: one exchange a round.
    """

    paper: ClassVar[str] = "Duan et al., 2021, as in Wang et al."
    leaves: ClassVar[str] = "everything, and statistics of each BN layer: L + 1 exchanges (`exchange=paper`: 2L + 1)"
    use: ClassVar[str] = "FedTAN without its backward half"
    modes: ClassVar[Mapping[str, str]] = {"fused": "forward", "paper": "forward-paper", "carried": "carried-forward"}
