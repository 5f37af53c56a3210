"""Bounds on each step's gradient, options of every strategy."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.client.rules import Rule, Session, register_rule

#: the smallest norm that weights are taken to have when gradients are clipped, so that those at 0
#: can leave it
EPS = 1e-3


@register_rule
class GradientNorm(Rule):
    """Scale the gradients of a step down to an L2 norm over all parameters, as
    `torch.nn.utils.clip_grad_norm_`.

    Each client scales its own. The mean of a layer-wise step's gradients is then no longer
    centralized BN's.
    """

    #: the largest norm; 0 is off
    clip_norm: float = 0.0
    #: after the terms, corrections and clippings of methods
    order: ClassVar[int] = 2
    replays: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    needs_all: ClassVar[bool] = True

    def begin(self, session: Session) -> None:
        """Note the parameters that learn."""
        self._learned = list(session.learned().values())
        self._stacked = session.stacked

    def adjust(self) -> None:
        """Scale the gradients; stacked, those of each client by their own norm."""
        gradients = [parameter.grad for parameter in self._learned if parameter.grad is not None]
        if not gradients:
            return
        norms = [
            torch.linalg.vector_norm(g.reshape(*g.shape[: self._stacked], -1), dim=-1)
            for g in gradients
        ]
        scale = (
            self.clip_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)
        ).clamp(max=1)
        scales = [
            scale.reshape(scale.shape + (1,) * (gradient.dim() - scale.dim()))
            for gradient in gradients
        ]
        torch._foreach_mul_(gradients, scales)


@register_rule
class Clipping(Rule):
    """Clip every gradient in proportion to the weights it changes, except the classifier's:
    adaptive clipping.
    """

    #: largest ratio of a unit's gradient to its weights; 0 is off
    clip_factor: float = 0.0
    #: last, because it clips what the optimizer will take
    order: ClassVar[int] = 1
    replays: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True

    def begin(self, session: Session) -> None:
        """Remember what to clip."""
        structure = session.structure or session.model
        skipped = {id(parameter) for parameter in classifier_parameters(structure)}
        names = {
            name for name, parameter in structure.named_parameters() if id(parameter) not in skipped
        }
        self._clipped = {
            name: value for name, value in session.model.named_parameters() if name in names
        }
        self._stacked = session.stacked

    def adjust(self) -> None:
        """Clip the gradients."""
        clip_gradients(self._clipped, self.clip_factor, self._stacked)


def clip_gradients(
    parameters: Mapping[str, nn.Parameter], clip_factor: float, stacked: bool = False
) -> None:
    """Clip the gradients of named parameters in place, unit by unit.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021,
    equation 3: where |G_i| / max(|W_i|, eps) > clip_factor, G_i becomes clip_factor max(|W_i|, eps)
    G_i / |G_i|, for the weights i into one output, eps = 1e-3. A bias or a gain is one unit as a
    whole. FedWon's factor is 0.1. `stacked` parameters have a row for each of several models.
    """
    gradients = []
    ratios = []
    sizes = []
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            whole = parameter.dim() - stacked < 2 or name.rpartition(".")[2] == "gain"
            unit = tuple(range(stacked + (not whole), parameter.dim()))
            gradients.append(parameter.grad)
            ratios.append(_norms(parameter.detach(), unit))
            sizes.append(_norms(parameter.grad, unit))
    if gradients:
        torch._foreach_clamp_min_(ratios, EPS)
        torch._foreach_mul_(ratios, clip_factor)
        torch._foreach_div_(ratios, sizes)
        torch._foreach_clamp_max_(ratios, 1.0)
        torch._foreach_mul_(gradients, ratios)


def _norms(values: Tensor, unit: tuple[int, ...]) -> Tensor:
    """Return the norms over these dimensions, over none of them (all, to torch) the magnitudes."""
    if not unit:
        return values.abs()
    norms: Tensor = torch.linalg.vector_norm(values, dim=unit, keepdim=True)
    return norms


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the last linear layer in the model's order, or of the last convolution."""
    for kind in (nn.Linear, _ConvNd):
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        if layers:
            return list(layers[-1].parameters())
    return []
