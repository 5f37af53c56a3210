"""Finding layers in any model, putting others in their place, and the register of what does so by
name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr.plugins import add, warn_once

#: takes a model, and options as keyword arguments; returns the model's root
Swap = Callable[..., nn.Module]
#: the normalizers by name; `register_norm` adds one
NORMS: dict[str, Swap] = {}

S = TypeVar("S", bound=Swap)


def register_norm(name: str) -> Callable[[S], S]:
    """Register a function that swaps a model's normalizers, under the name that `--norm` takes.

    Used as a decorator.

        @register_norm("identity")
        def identity_norm(model: nn.Module) -> nn.Module:
            return swap_normalizers(model, lambda slot: nn.Identity())

    Further parameters are options (`norm-options`). A name that another normalizer has is a
    ValueError.
    """

    def register(swap: S) -> S:
        add(NORMS, "normalizer", name, swap)
        return swap

    return register


#: packages whose normalizers do nothing but normalize, and call their children
WITHOUT_MORE = ("timm.", "torch.")
#: not LayerNorm, which belongs to transformers
NORMALIZERS = (_BatchNorm, _InstanceNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Slot:
    """The properties of a normalizer that its replacement needs."""

    name: str
    layer: nn.Module
    channels: int
    eps: float
    momentum: float | None
    affine: bool


def substitute(model: nn.Module, make: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Put `make(name, layer)` in the place of every layer, and return the root; the layer itself
    stays.

    A layer that the model holds under two names is made once, and the two names share what was
    made.
    """
    # All are made before the first is put in, so that an error leaves the model as it was.
    made = {layer: _frozen_like(layer, make(name, layer)) for name, layer in model.named_modules()}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if name and made[layer] is not layer:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[layer])
    return made[model]


def _frozen_like(old: nn.Module, new: nn.Module) -> nn.Module:
    """Freeze (`requires_grad`) new parameters whose namesakes in the old layer are, and others if
    all of it is.
    """
    learns = {
        name: parameter.requires_grad for name, parameter in old.named_parameters(recurse=False)
    }
    default = any(learns.values()) or not learns
    kept = set(old.parameters())
    for name, parameter in new.named_parameters():
        if parameter not in kept:
            parameter.requires_grad_(learns.get(name.rpartition(".")[2], default))
    return new


def swap_normalizers(model: nn.Module, make: Callable[[Slot], nn.Module]) -> nn.Module:
    """Put `make(slot)` in the place of every normalizer, on its device and in its precision."""
    fallback = _floating_tensor(model)

    def make_one(name: str, layer: nn.Module) -> nn.Module:
        if not isinstance(layer, NORMALIZERS):
            return layer
        slot = _slot(name, layer)
        new = make(slot)
        if new is layer:
            return layer
        _check_loss(slot, new)
        return _fit(new, slot, fallback)

    return substitute(model, make_one)


#: entries of a BN layer, which each replacement has in its own form
ENTRIES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _slot(name: str, layer: nn.Module) -> Slot:
    channels = layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.num_features
    if not channels:
        raise ValueError(f"layer {name!r} is lazy and not built yet: run the model once first")
    momentum = getattr(layer, "momentum", 0.1)
    return Slot(name, layer, channels, layer.eps, momentum, affine=layer.weight is not None)  # type: ignore[arg-type]


def _check_loss(slot: Slot, new: nn.Module) -> None:
    """Refuse to replace a layer of a user's own that has parameters or buffers which no replacement
    would have, and warn of a forward of its own.

    Layers of this package start fresh. What a layer has as children stays.
    """
    layer = slot.layer
    if type(layer).__module__.startswith(f"{__name__.partition('.')[0]}."):
        return
    held = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    lost = [name for name, _ in held if name not in ENTRIES]
    kind = type(layer).__name__
    other = type(new).__name__
    if lost:
        raise ValueError(
            f"layer {slot.name!r} is a {kind} with {', '.join(lost)}, which {other} would drop"
        )
    has_more = not type(layer).forward.__module__.startswith(WITHOUT_MORE)
    if has_more and not [*layer.children()]:
        warn_once(
            f"layer {slot.name!r} is a {kind} with a forward of its own: {other} takes its place "
            "without what that does besides normalizing"
        )


def _fit(new: nn.Module, slot: Slot, fallback: Tensor | None) -> nn.Module:
    old = slot.layer
    like = _floating_tensor(old)
    like = fallback if like is None else like
    if like is not None:
        new.to(like.device, like.dtype)
    if slot.affine and old.bias is None and getattr(new, "bias", None) is not None:
        new.register_parameter("bias", None)
    # timm's normalizers carry their dropout and activation as children, which have to stay.
    after = list(old.children())
    whole = nn.Sequential(new, *after) if after else new
    return whole.train(old.training)


def _floating_tensor(module: nn.Module) -> Tensor | None:
    tensors = chain(module.parameters(), module.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)
