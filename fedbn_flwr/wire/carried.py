"""The group `carried` of a training message: a node's corrections on the way to it, its local values on the way back.

Its entries are `statistics` and `gradients`, (2, C) each (see `fedbn_flwr.layerwise.Request`), with the channels of all
layers side by side, in the layers' alphabetical order; `layers`, the layers' names as bytes, one a line; and `sizes`,
(3, L): each layer's number of values of a channel, its channels, and those of its gradients, which may be none. Few
entries, because Flower sends each by a request of its own. Stacked, every entry has a first dimension with a row for
each client.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbn_flwr.layerwise import Answer, Corrections, Kind, Request
from fedbn_flwr.state import State

#: what is corrected
CORRECTIONS: tuple[Kind, Kind] = ("statistics", "gradients")
LAYERS, SIZES = "layers", "sizes"


def pack_values(requests: Mapping[str, Mapping[str, Request]]) -> State:
    """Return the entries for a client's requests, given by kind and layer; none without a BN layer."""
    statistics, gradients = (requests[kind] for kind in CORRECTIONS)
    if not statistics:
        return {}
    layers = sorted(statistics)
    counts = [statistics[layer].count for layer in layers]
    widths = [[_channels(each.get(layer)) for layer in layers] for each in (statistics, gradients)]
    values: State = {
        kind: torch.cat([requests[kind][layer].tensor for layer in layers if layer in requests[kind]], -1)
        for kind in CORRECTIONS
        if requests[kind]
    }
    names = bytearray("\n".join(layers).encode())
    return {**values, LAYERS: torch.frombuffer(names, dtype=torch.uint8), SIZES: torch.tensor([counts, *widths])}


def read_corrections(received: State) -> tuple[Corrections, Corrections]:
    """Return a node's corrections of statistics and of gradients by layer; none for a node that got none."""
    if not received:
        return {}, {}
    # the layers and the pool are the same for all clients of a stack
    names = received[LAYERS].reshape(-1, received[LAYERS].shape[-1])[0]
    layers = names.numpy(force=True).tobytes().decode(errors="replace").split("\n")
    counts, *widths = received[SIZES].reshape(-1, 3, len(layers))[0].tolist()
    statistics, gradients = (
        _by_layer(received.get(kind), layers, counts, channels)
        for kind, channels in zip(CORRECTIONS, widths, strict=True)
    )
    return statistics, gradients


def _by_layer(
    values: Tensor | None, layers: Sequence[str], counts: Sequence[int], channels: Sequence[int]
) -> Corrections:
    """Cut the values of one kind, which may be none, into those of the layers that have some."""
    parts = () if values is None else zip(layers, counts, values.split(list(channels), -1), strict=True)
    return {layer: Answer(part, count) for layer, count, part in parts if part.shape[-1]}


def _channels(request: Request | None) -> int:
    return 0 if request is None else request.tensor.shape[-1]
