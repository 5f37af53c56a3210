"""FedTAN-II."""

from typing import Annotated, Any, ClassVar, Literal

from .fedtan import FedTAN
from .fixbn import FixBN
from .registry import register_strategy


@register_strategy("fedtan-ii")
class FedTANII(FedTAN, FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics of the last of them.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 5.4.

        t <= M:  FedTAN
        t >  M:  FixBN's second stage, one exchange a round

    `m` is M: a number of rounds, a fraction of the run between 0 and 1, or `auto` (FixBN's rule), and takes the place
    of FixBN's `freeze_round`. With M at or above the number of rounds this is FedTAN, with M = 0 it is FixBN frozen
    from the start. Frozen statistics are not sent; the paper counts them (`send_frozen=True`). The paper lowers the
    learning rate at the freeze by hand, from 0.5 to 0.01 on CIFAR-10 and to 0.05 on MNIST: see `FixBN` for `frozen_lr`.
    """

    paper: ClassVar[str] = "Wang et al., 2023, arXiv:2301.02982"
    leaves: ClassVar[str] = "as `fedtan`, then as `fixbn`"
    use: ClassVar[str] = "FedTAN's statistics, with many exchanges in the first rounds only"
    replaced: ClassVar[tuple[str, ...]] = ("freeze_round",)

    def __init__(
        self,
        *,
        m: Annotated[
            float | Literal["auto"],
            "rounds of FedTAN before the statistics are frozen, or their fraction of the run, or auto",
        ] = 0.5,
        **options: Any,
    ) -> None:
        # FedTAN passes on what it does not know to FixBN
        passed: Any = {**options, "freeze_round": m}
        super().__init__(**passed)
