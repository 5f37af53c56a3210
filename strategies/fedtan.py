"""FedTAN."""

from typing import Annotated, Any

from fedbn_flwr.layerwise import Auto
from fedbn_flwr.server.layerwise_round import Conversation, Dialogue

from .base_layerwise import Layerwise, exchanges
from .fedtan_sweeps import _count, sweeping
from .registry import register_strategy

EXCHANGES = ("fused", "paper")


@register_strategy("fedtan")
class FedTAN(Layerwise):
    """BN statistics and their gradients are, in the first local step, those of all clients' mini-batches together.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, algorithms 1 to 3. In the first of
    E local steps, with L uses of BN layers, and p_i as for the models,

        forward, each layer:   mean = sum_i p_i mean_i,   variance = sum_i p_i variance_i
        backward, each layer:  dF/dmean = sum_i p_i dF_i/dmean,   dF/dvariance = sum_i p_i dF_i/dvariance

    so that with E = 1 and p_i proportional to the sizes of the mini-batches a round is one step of centralized SGD on
    their union. `exchange="paper"` asks for mean, variance and gradients one after the other: 3L + 1 exchanges a
    round; `fused`, the default, for mean and variance at once: 2L + 1, the same numbers. With one client this is
    FedAvg.

    `sweeps` exchanges all layers at once, so many times each way, by clients that hold nothing between messages (see
    `fedbn_flwr.layerwise.Corrected`): 2 S + 1 exchanges. S = 0 is FedAvg and S >= L is FedTAN; `auto` stops when no
    layer's statistics move by more than `tolerance`, at the latest after `most_sweeps`.

    Deviations: one optimizer for the round, where the authors' code takes the first step with one of its own
    (`fresh_optimizer=True`); p_i is the share of examples, in their code 1 / N (`weighting="uniform"`); the running
    variance is corrected by n / (n - 1), n being the count over all clients, as in PyTorch.
    """

    def __init__(
        self,
        *,
        exchange: Annotated[
            str, "fused (mean and variance in one exchange) or paper (in two); the same numbers"
        ] = "fused",
        sweeps: Annotated[int | str, "exchange all layers at once, so often each way: a number, auto or none"] = "none",
        tolerance: Annotated[float, "sweeps=auto stops when no layer's statistics move by more than this"] = 0.01,
        most_sweeps: Annotated[int, "cap of sweeps=auto, each way"] = 10,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if exchange not in EXCHANGES:
            raise ValueError(f"unknown exchange {exchange!r}; known: {', '.join(EXCHANGES)}")
        if sweeps != "none" and exchange != "fused":
            raise ValueError(f"sweeps are always fused: exchange={exchange!r} goes without them")
        self.exchange = exchange
        self.sweeps = Auto(tolerance, most_sweeps) if sweeps == "auto" else _count(sweeps)

    def layerwise_mode(self) -> str:
        """Nothing is exchanged in 0 sweeps."""
        if self.sweeps is None:
            return self.exchange
        return "sweeps" if self.sweeps else "none"

    def converse(self, talk: Dialogue) -> Conversation:
        """Layer by layer, or in sweeps."""
        return exchanges(talk) if self.sweeps is None else sweeping(talk, self.sweeps)
