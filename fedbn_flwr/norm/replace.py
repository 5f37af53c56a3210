"""Swapping every normalizer of a model for another kind."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedbn_flwr.norm.convolutions import standardized
from fedbn_flwr.norm.detect import bn_layers
from fedbn_flwr.norm.layers import (
    BatchNorm,
    BatchRenorm,
    GroupNorm,
    HybridBatchNorm,
    StaticBatchNorm,
)
from fedbn_flwr.norm.substitute import (
    NORMALIZERS,
    NORMS,
    Slot,
    register_norm,
    substitute,
    swap_normalizers,
)
from fedbn_flwr.plugins import did_you_mean, warn_once


def replace(model: nn.Module, kind: str, *, groups: int = 2, **options: object) -> nn.Module:
    """Swap every normalizer of `model` for one of `kind`, in place, and return the root.

    Normalizers are found by type: BN of any kind, GroupNorm and InstanceNorm, but not LayerNorm,
    which belongs to transformers. What is put in starts fresh: gamma 1, beta 0, running mean 0 and
    variance 1. If the model was trained, a log line says what is lost. `groups` is for GN. A kind
    that leaves no normalizer ("none", "wsconv", "fixup") cannot be turned back.
    """
    if kind not in NORMS:
        raise ValueError(f"unknown normalizer {kind!r}; {did_you_mean(kind, NORMS)}")
    swap = NORMS[kind]
    allowed = list(inspect.signature(swap).parameters)[1:]
    for option in options:
        if option not in allowed:
            known = ", ".join(allowed) or "none"
            raise ValueError(f"normalizer {kind!r} has no option {option!r}; its options: {known}")
    if "groups" in allowed:
        options["groups"] = groups
    before = {*model.modules()}
    name = type(model).__name__
    # of normalizers as they start, both are 0
    layers = [layer for layer in model.modules() if isinstance(layer, NORMALIZERS)]
    moved = [getattr(layer, entry, None) for layer in layers for entry in ("running_mean", "bias")]
    trained = any(
        value.any()
        for value in moved
        if value is not None and not (is_lazy(value) or value.is_meta)
    )
    kept = {
        key: value
        for key, value in model.state_dict().items()
        if isinstance(value, Tensor) and not is_lazy(value)
    }
    had = {}
    if trained:
        had = {key: value.clone() for key, value in kept.items()}
    root = swap(model, **options)
    state = root.state_dict()
    lost = [
        key for key, value in had.items() if key not in state or not torch.equal(state[key], value)
    ]
    after = {*root.modules()}
    if kind != "bn" and after == before:
        warn_once(
            f"the normalizer {kind!r} takes no layer's place in the {name}, which stays as it is"
        )
    elif lost:
        about = f"{len(lost)} of {len(had)} entries of the weights, such as {lost[0]!r}"
        warn_once(f"the normalizer {kind!r} drops or changes {about}")
    elif kind == "bn" and (replaced := before - after):
        warn_once(f"BN takes the place of {len(replaced)} normalizers of other kinds in the {name}")
    return root


@register_norm("bn")
def batch_norm(model: nn.Module, momentum: float | None = None) -> nn.Module:
    """BN; layers that are BN already stay as they are, but for the weight of a mini-batch in
    running statistics.
    """

    def keep(slot: Slot) -> nn.Module:
        # this package's variants of BN are subclasses of its own BatchNorm; any other subclass
        # counts as BN
        kind = type(slot.layer)
        is_bn = issubclass(kind, _BatchNorm) and (
            kind is BatchNorm or not issubclass(kind, BatchNorm)
        )
        if is_bn:
            return slot.layer
        return BatchNorm(**_form(slot))

    root = swap_normalizers(model, keep)
    if momentum is not None:
        for layer in bn_layers(root).values():
            layer.momentum = momentum
    return root


@register_norm("gn")
def group_norm(model: nn.Module, groups: int = 2) -> nn.Module:
    """GN with `groups` groups a layer.

    The default is two, as in FixBN's comparison (Zhong et al. 2023, appendix B.4).
    """
    return swap_normalizers(model, lambda slot: _group(slot, groups))


@register_norm("ln")
def layer_norm(model: nn.Module) -> nn.Module:
    """LN over a sample's channels and positions: GN with one group, so gamma stays one number a
    channel.
    """
    return swap_normalizers(model, lambda slot: _group(slot, 1))


@register_norm("in")
def instance_norm(model: nn.Module) -> nn.Module:
    """IN, each channel of each sample by itself, without running statistics: GN with one group a
    channel.
    """
    return swap_normalizers(model, lambda slot: _group(slot, slot.channels))


@register_norm("gn-ws")
def group_norm_standardized(model: nn.Module, groups: int = 2) -> nn.Module:
    """GN, and convolutions with weight standardization.

    Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
    2019: W'_ij = (W_ij - mean_i) / sigma_i. Here, every row W_i - mean_i starts with norm 1: see
    `standardized`.
    """
    return substitute(
        group_norm(model, groups), lambda name, layer: standardized(name, layer, gamma=None)
    )


@register_norm("bn-ws")
def batch_norm_standardized(model: nn.Module) -> nn.Module:
    """BN, and the convolutions of `gn-ws`, whose outputs stay bounded where BN's statistics are
    frozen.
    """
    return substitute(batch_norm(model), lambda name, layer: standardized(name, layer, gamma=None))


@register_norm("brn")
def batch_renorm(model: nn.Module, r_max: float = 3.0, d_max: float = 5.0) -> nn.Module:
    """Batch renormalization."""
    return swap_normalizers(
        model, lambda slot: BatchRenorm(**_form(slot), r_max=r_max, d_max=d_max)
    )


@register_norm("static-bn")
def static_batch_norm(model: nn.Module) -> nn.Module:
    """HeteroFL's static BN."""
    return swap_normalizers(model, lambda slot: StaticBatchNorm(**_form(slot)))


@register_norm("hbn")
def hybrid_batch_norm(model: nn.Module) -> nn.Module:
    """HBN's hybrid BN."""
    return swap_normalizers(model, lambda slot: HybridBatchNorm(**_form(slot)))


def _form(slot: Slot) -> dict[str, Any]:
    """Return the arguments that any kind of BN takes over from the layer that it replaces."""
    return {
        "num_features": slot.channels,
        "eps": slot.eps,
        "momentum": slot.momentum,
        "affine": slot.affine,
    }


def _group(slot: Slot, groups: int) -> GroupNorm:
    if groups < 1 or slot.channels % groups:
        raise ValueError(
            f"layer {slot.name!r}: {slot.channels} channels do not divide into {groups} groups"
        )
    return GroupNorm(groups, slot.channels, name=slot.name, eps=slot.eps, affine=slot.affine)


class NormalizedFeatures(nn.Linear):
    """A linear layer whose inputs are scaled to a mean square of 1."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each sample's features."""
        return super().forward(F.normalize(input, dim=-1) * self.in_features**0.5)


def normalize_features(model: nn.Module) -> nn.Module:
    """Let the classifier, the last linear layer, take normalized features; return the root.

    Zhang, Beitollahi, Bie, Chen, Understanding the Role of Layer Normalization in Label-Skewed
    Federated Learning, TMLR 2024, arXiv:2308.09565: their feature normalization, with the length
    that layer normalization leaves, the root of the number of features. A sample's features all 0
    stay 0.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError("normalize-features needs a model with a linear layer")

    def make(_: str, layer: nn.Module) -> nn.Module:
        if layer is not layers[-1]:
            return layer
        new = NormalizedFeatures(layer.in_features, layer.out_features, layer.bias is not None)
        new.weight = layer.weight
        new.bias = layer.bias
        return new.train(layer.training)

    return substitute(model, make)
