"""Both halves of a method in one file, as in a package of a user's own: gradients with a pull
towards zero.

    client:  w <- w - lr (g(w) + r w)
    server:  w <- sum_k p_k w_k, as FedAvg

which is FedAvg with the weight decay r.
"""

from typing import Annotated, Any

from fedbn_flwr.client import Rule, Session, register_rule
from fedbn_flwr.strategies import FedAvg, register_strategy
from fedbn_flwr.wire import Instruction


@register_rule
class Shrink(Rule):
    """Add r w to every gradient."""

    #: r
    shrink_rate: float = 0.0

    def begin(self, session: Session) -> None:
        """Note the parameters."""
        self._parameters = list(session.learned().values())

    def adjust(self) -> None:
        """Add r w."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=self.shrink_rate)


@register_strategy("toy")
class Toy(FedAvg):
    """FedAvg with clients that shrink their parameters."""

    def __init__(
        self,
        *,
        rate: Annotated[float, "share of a weight that is added to its gradient"] = 0.1,
        **options: Any,
    ):
        super().__init__(**options)
        self.rate = rate

    def instruct(self, instruction: Instruction) -> Instruction:
        """Ask for the rule."""
        return super().instruct(instruction).with_rule(shrink_rate=self.rate)
