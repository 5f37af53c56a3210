"""Adaptive gradient clipping."""

from fedbn_flwr import norm
from fedbn_flwr.rules.rule import Rule, Session


class Clipping(Rule):
    """Clip every gradient in proportion to the weights it changes, except the classifier's (FedWon)."""

    def begin(self, session: Session) -> None:
        """Remember what to clip."""
        self._model, self._factor = session.model, session.instruction.clip_factor
        self._skip = norm.classifier_parameters(session.model)

    def adjust(self) -> None:
        """Clip."""
        norm.adaptive_clip(self._model, self._factor, self._skip)
