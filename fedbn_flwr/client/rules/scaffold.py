"""SCAFFOLD's control variates. The server's half is `strategies/scaffold.py`."""

import torch
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.rules.base import Rule, Session, on_device
from fedbn_flwr.client.rules.registry import register_rule


@register_rule
class ControlVariates(Rule):
    """Correct every gradient by c - c_i, over the parameters that are shared, never buffers.

    Karimireddy et al., SCAFFOLD, ICML 2020, algorithm 1, option II: after K steps of plain SGD from x to y,

        c_i+ = c_i - c + (x - y) / (K lr)

    The client sends c_i+ - c_i. Its c_i is 0 until it first takes part.

    Every step was y <- y - lr (g_k - c_i + c), so option II is the mean of the round's gradients,

        c_i+ = (g_1 + ... + g_K) / K

    and this rule takes that mean itself. For plain SGD the numbers are option II's. With momentum or Adam, x - y is
    no longer K lr times a mean gradient: with momentum m from rest it is larger by the factor
    sum_k (1 - m^k) / (K (1 - m)), 2.6 for m = 0.9 and K = 5, and option II as printed diverges. Weight decay is the
    same function on every client and needs no correction, so c_i is without it.
    """

    #: whether gradients are corrected
    control_variates: bool = False

    def begin(self, session: Session) -> None:
        """Recall c_i, and start the sum of gradients."""
        shared = {name: value for name, value in session.learned().items() if name not in session.local}
        zeros = {name: torch.zeros_like(value) for name, value in shared.items()}
        server = {**zeros, **on_device(session.received.get(wire.CONTROL_VARIATES, {}), zeros)}
        self._own = {**zeros, **on_device(session.memory.recall(wire.CONTROL_VARIATES), zeros)}
        self._sums = {name: torch.zeros_like(value) for name, value in shared.items()}
        self._corrected = [(value, self._sums[name], server[name] - self._own[name]) for name, value in shared.items()]

    def adjust(self) -> None:
        """Sum the gradients, and add c - c_i to them."""
        for parameter, total, correction in self._corrected:
            if parameter.grad is not None:
                total.add_(parameter.grad)
                parameter.grad.add_(correction)

    def finish(self, session: Session) -> None:
        """Store c_i+ and send its change."""
        after = {name: total / _steps(session, total) for name, total in self._sums.items()}
        session.memory.store(wire.CONTROL_VARIATES, after)
        session.records[wire.CONTROL_VARIATES] = {name: value - self._own[name] for name, value in after.items()}


def _steps(session: Session, like: Tensor) -> int | Tensor:
    """Return K, as one number or, for stacked clients with different numbers of steps, one in each row."""
    if not isinstance(session.steps, Tensor):
        return max(session.steps, 1)
    return session.steps.clamp(min=1).to(like).reshape(-1, *[1] * (like.dim() - 1))
