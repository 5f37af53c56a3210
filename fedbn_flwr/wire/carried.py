"""The group `carried` of a training message: a node's corrections on the way to it, its local values on the way back.

Its entries are `statistics/LAYER` and `gradients/LAYER`, (2, C) each (see `fedbn_flwr.layerwise.Request`), and
`counts`: for every layer of the statistics, in alphabetical order, the number of values of each channel. Stacked, every
entry has a first dimension with a row for each client.
"""

from collections.abc import Mapping

import torch

from fedbn_flwr.layerwise import Answer, Corrections, Request
from fedbn_flwr.state import State
from fedbn_flwr.wire.layerwise import CORRECTIONS

COUNTS = "counts"


def pack_values(requests: Mapping[str, Mapping[str, Request]]) -> State:
    """Return the entries for a client's requests, given by kind and layer; none without a BN layer."""
    values = {f"{kind}/{layer}": each.tensor for kind in CORRECTIONS for layer, each in requests[kind].items()}
    counts = [each.count for _, each in sorted(requests["statistics"].items())]
    return {**values, COUNTS: torch.tensor(counts)} if values else {}


def read_corrections(received: State) -> tuple[Corrections, Corrections]:
    """Return a node's corrections of statistics and of gradients by layer; none for a node that got none."""
    layers = sorted(name.removeprefix("statistics/") for name in received if name.startswith("statistics/"))
    # the pool is the same for all clients of a stack
    counts = dict(zip(layers, received[COUNTS].reshape(-1, len(layers))[0].tolist(), strict=True)) if layers else {}
    statistics, gradients = (
        {layer: Answer(received[f"{kind}/{layer}"], counts[layer]) for layer in layers if f"{kind}/{layer}" in received}
        for kind in CORRECTIONS
    )
    return statistics, gradients
