"""FedDNA: FedTAN's forward pass (Algorithm 2) without its backward pass; see `strategies/fedtan.py`."""

from typing import ClassVar

from .base_layerwise import Layerwise
from .registry import register_strategy


@register_strategy("feddna")
class FedDNA(Layerwise):
    """BN statistics, but not their gradients, are those of all clients' mini-batches in the first local step.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 6: FedAvg + algorithm 2,
    their simplified form of FedDNA (Duan et al., FedDNA: Federated Learning with Decoupled Normalization-Layer
    Aggregation for Non-IID Data, ECML PKDD 2021).

        forward, each layer:   mean = sum_i p_i mean_i,   variance = sum_i p_i variance_i

    and backward each client goes on with its own dF_i/dmean and dF_i/dvariance. L + 1 exchanges a round, because mean
    and variance travel together (the paper's algorithm asks for one after the other). With one client this is FedAvg.
    """

    mode: ClassVar[str] = "forward"
