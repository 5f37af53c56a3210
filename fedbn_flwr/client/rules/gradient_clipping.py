"""Adaptive gradient clipping."""

from fedbn_flwr import norm
from fedbn_flwr.client.rules.base import Rule, Session


class Clipping(Rule):
    """Clip every gradient in proportion to the weights it changes, except the classifier's (FedWon)."""

    def begin(self, session: Session) -> None:
        """Remember what to clip."""
        structure = session.structure or session.model
        skipped = {id(parameter) for parameter in norm.classifier_parameters(structure)}
        names = [name for name, parameter in structure.named_parameters() if id(parameter) not in skipped]
        self._clipped = [parameter for name, parameter in session.model.named_parameters() if name in names]
        self._factor, self._stacked = session.instruction.clip_factor, session.stacked

    def adjust(self) -> None:
        """Clip."""
        norm.clip_gradients(self._clipped, self._factor, self._stacked)
