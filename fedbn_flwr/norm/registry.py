"""The register of normalizers, by the name that `--norm` and `STRATEGY+NORM` take."""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from fedbn_flwr.plugins import add

#: takes a model, and options as keyword arguments; returns the model's root
Swap = Callable[..., nn.Module]
#: the normalizers by name; `register_norm` adds one
NORMS: dict[str, Swap] = {}

S = TypeVar("S", bound=Swap)


def register_norm(name: str) -> Callable[[S], S]:
    """Register a function that swaps a model's normalizers, under the name that `--norm` takes; used as a decorator.

        @register_norm("identity")
        def identity_norm(model: nn.Module) -> nn.Module:
            return swap_normalizers(model, lambda slot: nn.Identity())

    Further parameters are options (`norm-options`). A name that another normalizer has is a ValueError.
    """

    def register(swap: S) -> S:
        add(NORMS, "normalizer", name, swap)
        return swap

    return register
