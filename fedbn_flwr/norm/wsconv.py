"""Networks without normalizers, and FedWon's, with scaled weight standardization of every
convolution.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.norm.convolutions import standardized
from fedbn_flwr.norm.substitute import Slot, register_norm, substitute, swap_normalizers
from fedbn_flwr.norm.trace import Activation, Wiring, wiring
from fedbn_flwr.plugins import warn_once

GAINS = ("constant", "learnable")


@register_norm("wsconv")
def weight_standardized(
    model: nn.Module,
    gain: str = "constant",
    gamma: float | None = None,
    branch_scale: float | str = "auto",
) -> nn.Module:
    """Remove every normalizer, and standardize and scale every convolution's weight.

    Zhuang and Lyu, "FedWon", ICLR 2024, equation 3, after Brock et al., "Characterizing Signal
    Propagation", 2021: W'_ij = gain gamma (W_ij - mean_i) / (sigma_i sqrt(N)), N the fan-in,
    sigma_i^2 = (1/N) sum_j (W_ij - mean_i)^2 (the square is missing in print). gamma makes up for
    what the activation before the convolution takes from the variance, sqrt(2 / (1 - 1/pi)) for
    ReLU and for the images, and is 1 after a linear bottleneck; a number is used for all. `gain` is
    a constant 1, neither trained nor part of the state, or "learnable".

    Deviation: the last convolution of every residual branch has the gain `branch_scale`. By default
    it is "auto", sqrt(2 / branches), so that the variance grows by less than e^2 through any number
    of blocks. Without, it doubles at every block, and ResNet-20 diverges at learning rates at which
    it trains with GN. FedWon does not mention such a gain (Brock et al. scale branches by 0.2):
    "paper" is the number 1. In a model that cannot be traced no branch is scaled and gamma is that
    of ReLU, which the log says.
    """
    if gain not in GAINS:
        raise ValueError(f"unknown gain {gain!r}; there are: {', '.join(GAINS)}")
    _branch_gain(branch_scale, 1)  # refused before the model is changed
    model = remove_normalizers(model)
    traced = _wiring(model)
    scale = _branch_gain(branch_scale, len(traced.branch_ends))

    def make(name: str, layer: nn.Module) -> nn.Module:
        own_gamma = gamma
        if gamma is None:
            own_gamma = activation_gain(traced.activations.get(name))
        first_gain = 1.0
        if name in traced.branch_ends:
            first_gain = scale
        return standardized(name, layer, own_gamma, first_gain, learnable=gain == "learnable")

    return substitute(model, make)


def _branch_gain(branch_scale: float | str, branches: int) -> float:
    if branch_scale == "auto":
        return math.sqrt(2 / max(branches, 1))
    gain = branch_scale
    if branch_scale == "paper":
        gain = 1.0
    if isinstance(gain, str) or not gain > 0:
        raise ValueError(
            f"branch_scale must be auto, paper or a number above 0, got {branch_scale!r}"
        )
    return float(gain)


def activation_gain(activation: Activation | None) -> float:
    """Return the gain that gives `activation(z)` variance 1, for standard normal z; 1 without an
    activation.
    """
    if activation is None:
        return 1.0
    nodes, weights = np.polynomial.legendre.leggauss(20)
    # kinks of activations lie at whole numbers
    points = np.arange(-10, 10)[:, None] + (nodes + 1) / 2
    density = weights / 2 * np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)
    values = activation(torch.from_numpy(points)).numpy()
    mean = np.sum(density * values)
    return float(np.sum(density * (values - mean) ** 2) ** -0.5)


def _wiring(model: nn.Module) -> Wiring:
    try:
        return wiring(model)
    except Exception as error:  # torch.fx raises whatever the model's own code does with a proxy
        kind = type(model).__name__
        warn_once(f"residual branches are not scaled: {kind} cannot be traced ({error})")
        names = (name for name, layer in model.named_modules() if isinstance(layer, _ConvNd))
        return Wiring(activations=dict.fromkeys(names, torch.relu))


@register_norm("none")
def remove_normalizers(model: nn.Module) -> nn.Module:
    """Take every normalizer out; every convolution without a bias gets one, at zero.

    A convolution before a normalizer often has no bias, because beta does its work. Which
    convolution a normalizer belonged to cannot be told for any model, so all have one afterwards,
    as in normalizer-free networks (Brock et al. 2021); a model whose normalizers had no beta stays
    without. It learns if weight and beta do.
    """
    beta_learns = list[bool]()

    def drop(slot: Slot) -> nn.Module:
        beta_learns.extend(
            value.requires_grad for name, value in slot.layer.named_parameters() if name == "bias"
        )
        return nn.Identity()

    model = swap_normalizers(model, drop)
    for layer in model.modules():
        if beta_learns and isinstance(layer, _ConvNd) and layer.bias is None:
            learns = layer.weight.requires_grad and any(beta_learns)
            layer.bias = nn.Parameter(
                layer.weight.new_zeros(layer.out_channels), requires_grad=learns
            )
    return model
