"""FedTAN-II."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Unpack

from fedbn_flwr.wire import Instruction

from .fedtan import FedTAN, FedTANOptions
from .fixbn import FixBN, FreezeOptions
from .registry import register_strategy


class FedTANIIOptions(FedTANOptions, FreezeOptions, total=False):
    """The constructor's arguments beside `m` and `frozen_lr`."""


@register_strategy("fedtan-ii")
class FedTANII(FedTAN, FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics of the last of them.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 5.4.

        t <= M:  FedTAN
        t >  M:  FixBN's second stage, one exchange a round

    `m` is M: a number of rounds, a fraction of the run between 0 and 1, or `auto` (FixBN's rule), and takes the place
    of FixBN's `freeze_round`. With M at or above the number of rounds this is FedTAN, with M = 0 and `frozen_lr=1` it
    is FixBN frozen from the start. Frozen statistics are not sent; the paper counts them (`send_frozen=True`).

    Under frozen statistics nothing rescales the layers any more, and a rate that BN bears can make training diverge.
    The paper lowers it at the freeze, by hand: from 0.5 to 0.01 on CIFAR-10, to 0.05 on MNIST. Here it is from then on
    at most `frozen_lr` times the run's `lr`, and lower where the schedule is; a schedule that names the freeze itself
    (`lr_schedule="=0.01@freeze"`, as in the paper) is followed as it stands.
    """

    paper: ClassVar[str] = "Wang et al., 2023"
    leaves: ClassVar[str] = "as fedtan, then as fixbn"
    replaced: ClassVar[tuple[str, ...]] = ("freeze_round",)

    def __init__(
        self,
        *,
        m: Annotated[
            float | Literal["auto"],
            "rounds of FedTAN before the statistics are frozen, or their fraction of the run, or auto",
        ] = 0.5,
        frozen_lr: Annotated[float, "largest learning rate under frozen statistics, as a share of lr"] = 0.2,
        **options: Unpack[FedTANIIOptions],
    ) -> None:
        # FedTAN passes on what it does not know to FixBN
        passed: Any = {**options, "freeze_round": m}
        super().__init__(**passed)
        if frozen_lr < 0:
            raise ValueError(f"frozen_lr must not be negative, got {frozen_lr}")
        self.frozen_lr = frozen_lr

    def instruct(self, instruction: Instruction) -> Instruction:
        """Lower the learning rate once statistics are frozen."""
        asked = super().instruct(instruction)
        if asked.freeze not in ("statistics", "both") or self.schedule.names_freeze:
            return asked
        return replace(asked, lr=min(asked.lr, self.frozen_lr * instruction.lr))
