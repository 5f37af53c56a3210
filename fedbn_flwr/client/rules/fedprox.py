"""FedProx's proximal term."""

from fedbn_flwr.client.rules.base import Rule, Session
from fedbn_flwr.client.rules.registry import register_rule


@register_rule
class Proximal(Rule):
    """The gradient of (mu / 2) * ||w - w_0||^2, w_0 being the received parameters.

    T. Li et al., Federated Optimization in Heterogeneous Networks (FedProx), MLSys 2020. Over the parameters that
    learn, at every step; added to the gradient, so that the training loss stays the loss on the data.
    """

    #: mu; `proximal-mu` is also what Flower's own FedProx sends
    proximal_mu: float = 0.0

    def begin(self, session: Session) -> None:
        """Remember the received parameters."""
        self._anchored = [(value, value.detach().clone()) for value in session.learned().values()]

    def adjust(self) -> None:
        """Add mu (w - w_0)."""
        for parameter, anchor in self._anchored:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - anchor, alpha=self.proximal_mu)
