"""Fixup: residual networks that train without normalizers because of how they start."""

from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.norm.substitute import NORMALIZERS, register_norm, substitute
from fedbn_flwr.plugins import extra


class Shift(nn.Module):
    """Adds one learnable number, zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, input: Tensor) -> Tensor:
        """x + bias."""
        return input + self.bias


class ScaleAndShift(Shift):
    """Multiplies by one learnable number, one at first, and adds another, zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        """x scale + bias."""
        return input * self.scale + self.bias


@register_norm("fixup")
def fixup(model: nn.Module) -> nn.Module:
    """Remove every normalizer of a residual network, and initialize it so that it trains without.

    Zhang, Dauphin and Ma, "Fixup Initialization", ICLR 2019. With L residual branches of m
    convolutions each:
    1. the classifier and the last convolution of every branch start at zero;
    2. the other convolutions of a branch start L^(-1 / (2m - 2)) times smaller than usual;
    3. there is a scalar multiplier, one at first, at the end of every branch, and a scalar bias,
       zero at first, before every convolution, linear layer and activation. Deviations: a
       convolution in a shortcut has a bias of its own (the authors' code takes the branch's first),
       and all learn at one rate (the authors' scalars at a tenth of it).
    """
    blocks = _residual_blocks(model)
    classifier = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    # without an activation behind them are the ends of branches and of shortcuts
    scalars: dict[nn.Module, nn.Module] = {
        getattr(block, f"bn{_length(block)}"): ScaleAndShift() for block in blocks
    }
    shortcuts = [block.downsample for block in blocks if block.downsample is not None]
    scalars |= {layer: nn.Identity() for shortcut in shortcuts for layer in shortcut.modules()}
    _start(blocks, classifier)

    def make(name: str, layer: nn.Module) -> nn.Module:
        if isinstance(layer, NORMALIZERS):
            return scalars.get(layer, Shift()).to(classifier.weight)
        if isinstance(layer, nn.Conv2d) or layer is classifier:
            return nn.Sequential(Shift().to(classifier.weight), layer)
        return layer

    return substitute(model, make)


def _residual_blocks(model: nn.Module) -> list[Any]:
    with extra("models"):  # takes seconds to import: only who needs it pays
        from torchvision.models.resnet import BasicBlock, Bottleneck

    blocks = [layer for layer in model.modules() if isinstance(layer, BasicBlock | Bottleneck)]
    if not blocks:
        raise ValueError(
            "normalizer 'fixup' is for residual networks of torchvision's BasicBlock and "
            f"Bottleneck (resnet20, resnet18 and its kin), and this {type(model).__name__} has none"
        )
    return blocks


@torch.no_grad()
def _start(blocks: list[Any], classifier: nn.Linear) -> None:
    for block in blocks:
        length = _length(block)
        for position in range(1, length):
            getattr(block, f"conv{position}").weight.mul_(len(blocks) ** (-1 / (2 * length - 2)))
        getattr(block, f"conv{length}").weight.zero_()
    classifier.weight.zero_()
    classifier.bias.zero_()


def _length(block: Any) -> int:
    """Return the number of convolutions of a block's branch."""
    return 3 if hasattr(block, "conv3") else 2
