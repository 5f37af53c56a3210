"""A node's half of statistics that are gathered layer by layer, in one conversation with the server.

The server's half is `Gathering.gather_in_order` of `strategies/base_gathering.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedbn_flwr import norm
from fedbn_flwr.layerwise import Exchange, Request
from fedbn_flwr.layerwise.exchange import FinishedExchange
from fedbn_flwr.norm import Moments


def gather_in_order(model: nn.Module, batches: Callable[[], Iterable[Tensor]], exchange: Exchange) -> None:
    """Give every BN layer the pooled statistics of all nodes, from the first layer to the last.

    For each layer all batches run through the model, whose layers before it have their pooled statistics already.
    `exchange` brings this node's mean and variance of the layer's inputs to the server, and the pooled ones back.
    """
    done = set[str]()
    while True:
        seen = norm.gather(model, batches(), normalize_with="running")
        layer = next((name for name in seen if name not in done), None)
        if layer is None:
            break
        own = seen[layer]
        answer = exchange(Request("statistics", layer, torch.stack([own.mean, own.variance]), own.count))
        norm.install(model, {layer: Moments(answer.count, *answer.tensor)})
        done.add(layer)
        if len(done) == len(seen):
            break
    if isinstance(exchange, FinishedExchange):
        exchange.finish()


def why_not_in_order(model: nn.Module, batch: Tensor) -> str:
    """Return why BN layers cannot be gathered one after the other, once each; nothing if they can."""
    layers, uses = norm.bn_layers(model), Counter[str]()
    handles = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: uses.update([name]))
        for name, layer in layers.items()
    ]
    try:
        norm.gather(model, [batch], normalize_with="running")
    finally:
        for handle in handles:
            handle.remove()
    named = Counter(id(layer) for _, layer in model.named_modules(remove_duplicate=False))
    for name, layer in layers.items():
        if uses[name] > 1 or named[id(layer)] > 1:
            return f"BN layer {name!r} is in several places of the model"
    return ""
