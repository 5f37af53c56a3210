"""Adaptive gradient clipping, FedWon's client half. The server's half is `strategies/fedwon.py`."""

from typing import ClassVar

from fedbn_flwr import norm
from fedbn_flwr.client.rules.base import Rule, Session
from fedbn_flwr.client.rules.registry import register_rule


@register_rule
class Clipping(Rule):
    """Clip every gradient in proportion to the weights it changes, except the classifier's (FedWon)."""

    #: largest ratio of a unit's gradient to its weights; 0 is off
    clip_factor: float = 0.0
    #: last, because it clips what the optimizer will take
    order: ClassVar[int] = 1

    def begin(self, session: Session) -> None:
        """Remember what to clip."""
        structure = session.structure or session.model
        skipped = {id(parameter) for parameter in norm.classifier_parameters(structure)}
        names = {name for name, parameter in structure.named_parameters() if id(parameter) not in skipped}
        self._clipped = {name: value for name, value in session.model.named_parameters() if name in names}
        self._stacked = session.stacked

    def adjust(self) -> None:
        """Clip the gradients."""
        norm.clip_gradients(self._clipped, self.clip_factor, self._stacked)
