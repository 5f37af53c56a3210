"""Bounds on each step's gradient, options of every strategy."""

from typing import ClassVar

import torch

from fedbn_flwr import norm
from fedbn_flwr.client.rules import Rule, Session, register_rule


@register_rule
class GradientNorm(Rule):
    """Scale the gradients of a step down to an L2 norm over all parameters, as `torch.nn.utils.clip_grad_norm_`.

    Each client scales its own. The mean of a layer-wise step's gradients is then no longer centralized BN's.
    """

    #: the largest norm; 0 is off
    clip_norm: float = 0.0
    #: after the terms, corrections and clippings of methods
    order: ClassVar[int] = 2

    def begin(self, session: Session) -> None:
        """Note the parameters that learn."""
        self._learned, self._stacked = list(session.learned().values()), session.stacked

    def adjust(self) -> None:
        """Scale the gradients; stacked, those of each client by their own norm."""
        gradients = [parameter.grad for parameter in self._learned if parameter.grad is not None]
        if not gradients:
            return
        norms = [torch.linalg.vector_norm(g.reshape(*g.shape[: self._stacked], -1), dim=-1) for g in gradients]
        scale = (self.clip_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(scale.reshape(scale.shape + (1,) * (gradient.dim() - scale.dim())))


@register_rule
class Clipping(Rule):
    """Clip every gradient in proportion to the weights it changes, except the classifier's: adaptive clipping."""

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
