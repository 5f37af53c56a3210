"""SCAFFOLD's control variates."""

import torch
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.rules.base import Rule, Session, on_device
from fedbn_flwr.client.rules.registry import register_rule


@register_rule
class ControlVariates(Rule):
    """Correct every gradient by c - c_i, over parameters only, never buffers.

    Karimireddy et al., SCAFFOLD, ICML 2020, algorithm 1, option II: after K steps with rate lr from x to y,

        c_i+ = c_i - c + (x - y) / (K lr)

    and c_i+ - c_i is sent. A node that takes part for the first time starts from the server's c.
    """

    #: whether gradients are corrected
    control_variates: bool = False

    def begin(self, session: Session) -> None:
        """Recall c_i, and remember c and x."""
        learned = session.learned()
        self._start = {name: value.detach().clone() for name, value in learned.items()}
        zeros = {name: torch.zeros_like(value) for name, value in self._start.items()}
        self._server = {**zeros, **on_device(session.received.get(wire.CONTROL_VARIATES, {}), self._start)}
        self._own = {**self._server, **on_device(session.memory.recall(wire.CONTROL_VARIATES), self._start)}
        self._learned = learned

    def adjust(self) -> None:
        """Add c - c_i."""
        for name, parameter in self._learned.items():
            if parameter.grad is not None:
                parameter.grad.add_(self._server[name] - self._own[name])

    def finish(self, session: Session) -> None:
        """Store c_i+ and send its change."""
        change = {
            name: _rate(session, moved := self._start[name] - parameter.detach()) * moved - self._server[name]
            for name, parameter in self._learned.items()
        }
        session.memory.store(wire.CONTROL_VARIATES, {name: self._own[name] + change[name] for name in change})
        shared = {name: value for name, value in change.items() if name not in session.local}
        session.records[wire.CONTROL_VARIATES] = shared


def _rate(session: Session, like: Tensor) -> float | Tensor:
    """1 / (K lr); where stacked clients take different numbers of steps, each row's own."""
    if not session.instruction.lr:
        return 0.0
    if not isinstance(session.steps, Tensor):
        return 1 / (max(session.steps, 1) * session.instruction.lr)
    rates = 1 / (session.steps.double().clamp(min=1) * session.instruction.lr)
    return rates.to(like).reshape(-1, *[1] * (like.dim() - 1))
