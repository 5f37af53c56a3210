"""FedTAN-II."""

from typing import Any, ClassVar

from .fedtan import FedTAN
from .fixbn import FixBN


class FedTANII(FedTAN, FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics that it found.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 5.4.

        t <= M:  FedTAN
        t >  M:  FixBN's second stage, one exchange a round

    `m` is M: a number of rounds, a fraction of the run between 0 and 1, or `auto` (FixBN's rule), and takes the place
    of FixBN's `freeze_round`. The paper lowers the rate with it, from 0.5 to 0.01, which is written
    `lr_schedule="=0.01@freeze"`: statistics that are frozen early, at a high rate, can make training diverge. With M at
    or above the number of rounds this is FedTAN, with M = 0 it is FixBN frozen from the start. Frozen statistics are
    not sent; the paper counts them (`send_frozen=True`).
    """

    replaced: ClassVar[tuple[str, ...]] = ("freeze_round",)

    def __init__(self, *, m: float | str = 0.5, **options: Any) -> None:
        super().__init__(**{**options, "freeze_round": m})
