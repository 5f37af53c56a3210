"""FedTAN, the server's half of Algorithm 1 of Wang et al. In the paper's symbols, and where it is done:

    for r = 1, 2, ..., R:                                                   Flower's Strategy.start
        server sends {w_{r-1}, S_{r-1}} to all clients i                    Layerwise.configure_train
        for t = 1:
            for l = 1, ..., L (Algorithm 2):                                take_step
                clients upload mu_i^l and (sigma_i^l)^2
                server answers sum_i p_i mu_i^l and sum_i p_i (sigma_i^l)^2            (39), (40)
            for l = L, ..., 1 (Algorithm 3):                                take_step
                clients upload dF_i/d(sigma_i^l)^2 and dF_i/dmu_i^l
                server answers their sums, weighted by p_i                             (41)
            clients update {w_i, S_i}                                       BNClient.train   (5b), (6)
        for t = 2, ..., E: clients update {w_i, S_i}                        BNClient.train   (5b), (6)
        clients send {w_i, S_i} to the server                               take_step
        server: {w_r, S_r} = sum_i p_i {w_i, S_i}                           FedAvg.pool                 (7)

`take_step` is in `fedbn_flwr/layerwise/take_step.py`, and the mathematics of one layer, which is the client's half, in
`shared_batch_norm.py` beside it. `Layerwise`, which starts again without the nodes that fail, is in
`base_layerwise.py`. What carries the exchanges between the two halves is in `fedbn_flwr/transports/`.
"""

from typing import Annotated, Any, ClassVar, Literal

from .base_carried import CarriedCorrections
from .registry import register_strategy


@register_strategy("fedtan")
class FedTAN(CarriedCorrections):
    """BN statistics and their gradients are, in the first local step, those of all clients' mini-batches together.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, algorithms 1 to 3. In the first of
    E local steps, with L uses of BN layers, and p_i as for the models,

        forward, each layer:   mean = sum_i p_i mean_i,   variance = sum_i p_i variance_i
        backward, each layer:  dF/dmean = sum_i p_i dF_i/dmean,   dF/dvariance = sum_i p_i dF_i/dvariance

    so that with E = 1 and p_i proportional to the sizes of the mini-batches a round is one step of centralized SGD on
    their union. `exchange="paper"` asks for mean, variance and gradients one after the other: 3L + 1 exchanges a
    round; `fused`, the default, for mean and variance at once: 2L + 1, the same numbers. With one client this is
    FedAvg.

    `carry=True` uses corrections from earlier rounds instead (see `CarriedCorrections`): one exchange a round, as
    FedAvg.

    Deviations: one optimizer for the round, where the authors' code takes the first step with one of its own
    (`fresh_optimizer=True`); p_i is the share of examples, in their code 1 / N (`weighting="uniform"`); the running
    variance is corrected by n / (n - 1), n being the count over all clients, as in PyTorch.
    """

    paper: ClassVar[str] = "Wang et al., 2023, arXiv:2301.02982"
    leaves: ClassVar[str] = "everything, and statistics of each BN layer with their gradients: 2L + 1 exchanges"

    def __init__(
        self,
        *,
        exchange: Annotated[
            Literal["fused", "paper"], "fused (mean and variance in one exchange) or paper (in two); the same numbers"
        ] = "fused",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.carry and exchange != "fused":
            raise ValueError(f"carried corrections are always fused: exchange={exchange!r} goes without them")
        self.exchange = exchange

    def layerwise_mode(self) -> str:
        """Return the exchange, or corrections from earlier rounds in its place."""
        return self.carried_mode if self.carry else self.exchange
