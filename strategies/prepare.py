"""The model that a method needs."""

from typing import Any

from torch import nn

from fedbn_flwr import norm
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.server.base_strategy import BaseStrategy

from .registry import REGISTRY


def prepare(model: nn.Module, method: str | type[BaseStrategy], **options: Any) -> nn.Module:
    """Return the model with the normalizers that a method brings: FedWon's, HBN's, HeteroFL's; others' stay.

    `method` is a strategy, or its name; `options` are those of its constructor. The model's normalizers are replaced
    in place. The server's initial model and the nodes' models are both made so.
    """
    if isinstance(method, str) and method not in REGISTRY:
        raise ValueError(f"unknown strategy {method!r}; {did_you_mean(method, REGISTRY)}")
    own = (REGISTRY[method] if isinstance(method, str) else method).own_norm(options)
    return model if own is None else norm.replace(model, own[0], **own[1])
