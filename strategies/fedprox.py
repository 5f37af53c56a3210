"""FedProx."""

from typing import Annotated, Any, ClassVar

import torch

from fedbn_flwr.client.rules import Rule, Session, register_rule
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@register_strategy("fedprox")
class FedProx(FedAvg):
    """FedAvg with a proximal term in the local objective.

    T. Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

        min_w  F_k(w) + (mu / 2) ||w - w_t||^2   over the trainable parameters, at every step

    With `mu=0` this is FedAvg.
    """

    paper: ClassVar[str] = "T. Li et al., MLSys 2020"

    def __init__(
        self,
        *,
        mu: Annotated[float, "weight of the proximal term", Range(0)] = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.mu = mu

    def instruct(self, instruction: Instruction) -> Instruction:
        """Add the proximal term."""
        return super().instruct(instruction).with_rule(proximal_mu=self.mu)


@register_rule
class Proximal(Rule):
    """The gradient of (mu / 2) * ||w - w_0||^2, w_0 being the received parameters.

    T. Li et al., Federated Optimization in Heterogeneous Networks (FedProx), MLSys 2020. Over the
    parameters that learn, at every step; added to the gradient, so that the training loss stays the
    loss on the data.
    """

    #: mu; `proximal-mu` is also what Flower's own FedProx sends
    proximal_mu: float = 0.0
    replays: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True

    def begin(self, session: Session) -> None:
        """Remember the received parameters."""
        learned = session.learned().values()
        received = [value.detach() for value in learned]
        anchors = session.keep("anchors", received)
        if anchors:
            torch._foreach_copy_(anchors, received)
        self._anchored = [*zip(learned, anchors, strict=True)]

    def adjust(self) -> None:
        """Add mu (w - w_0)."""
        moved = [
            (value.grad, value.detach(), anchor)
            for value, anchor in self._anchored
            if value.grad is not None
        ]
        if moved:
            gradients, values, anchors = zip(*moved, strict=True)
            ways = torch._foreach_sub(values, anchors)
            torch._foreach_add_(gradients, ways, alpha=self.proximal_mu)
