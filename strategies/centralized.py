"""The centralized reference."""

from typing import Any, ClassVar, Literal

from .fixbn import FixBN
from .registry import register_strategy

#: more rounds than any run has
NEVER = 10**9


@register_strategy("centralized")
class Centralized(FixBN):
    """Training on one node with the union of the data: an upper bound for the others, in the same number of steps.

    Trains rounds x E steps on batches as large as all clients' batches together; `batch_size` overrides that. With a
    `freeze_round` below the number of rounds it is Centralized+FixBN; by default nothing is frozen.
    """

    paper: ClassVar[str] = ""
    leaves: ClassVar[str] = "all data"
    use: ClassVar[str] = "the upper bound: one node with all data"
    pooled: ClassVar[bool] = True

    def __init__(self, *, freeze_round: float | Literal["auto"] = NEVER, **options: Any) -> None:
        super().__init__(freeze_round=freeze_round, **options)
        if freeze_round == NEVER:
            self.needs = "none"
