"""Statistics that are gathered layer by layer, in one conversation: the client's half and the server's."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr import norm
from fedbn_flwr.layerwise.exchange import Answer, Exchange, Requests
from fedbn_flwr.layerwise.take_step import Transport
from fedbn_flwr.norm import Moments

#: makes one set of moments by layer of all clients'
Unite = Callable[[Iterable[Mapping[str, Moments]]], dict[str, Moments]]


def gather_in_order(model: nn.Module, batches: Callable[[], Iterable[Tensor]], exchange: Exchange) -> None:
    """Give every BN layer the pooled statistics of all clients, from the first layer to the last.

    For each layer all batches run through the model, whose layers before it have their pooled statistics already.
    `exchange` brings this client's mean and variance of the layer's inputs to the server, and the pooled ones back.
    """
    done = set[str]()
    while True:
        seen = norm.gather(model, batches(), normalize_with="running")
        layer = next((name for name in seen if name not in done), None)
        if layer is None:
            return
        local = seen[layer]
        values = torch.stack([local.mean, local.variance])
        answer = exchange(Requests.of_client("statistics", layer, values, local.count))
        norm.install(model, {layer: Moments(answer.count, *answer.tensor)})
        done.add(layer)
        if len(done) == len(seen):
            return


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


def pool_in_order(
    transport: Transport[Any],
    require_usable: Callable[[str, Sequence[Moments]], None],
    unite: Unite = norm.pool,
) -> dict[str, Moments]:
    """Answer every layer's requests with their pooled moments; return these, by layer.

    `require_usable` is given each layer with the clients' moments, in the order of the rows, and may refuse them by an
    exception. The conversation is then abandoned. `unite` makes one set of moments of all clients'.
    """
    pooled: dict[str, Moments] = {}
    try:
        requests = transport.advance()
        while requests is not None:
            layer = requests.layer
            seen = [Moments(count, *values) for count, values in zip(requests.counts, requests.tensor, strict=True)]
            require_usable(layer, seen)
            moments = unite({layer: each} for each in seen)[layer]
            pooled[layer] = moments
            requests = transport.advance(Answer(torch.stack([moments.mean, moments.variance]), moments.count))
        transport.replies()
    except Exception:
        transport.abandon()
        raise
    return pooled
