"""The nodes' last local values, from which the server makes corrections for an ordinary training message.

The client's half is `fedbn_flwr/client/carried_corrections.py`, the mathematics `fedbn_flwr/layerwise/carried.py`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.common import log

from fedbn_flwr.layerwise import carried_corrections, why_unusable
from fedbn_flwr.server.averaging import Arrays
from fedbn_flwr.wire.carried import CORRECTIONS, LAYERS, SIZES

#: by node, its number of samples, or what else nodes are weighed by
Examples = Mapping[int, float]
_EXAMPLES, _GRADIENTS = "examples", "gradients"


class CarriedValues:
    """Each node's last local values of every BN layer, by node.

    If all together take more than `limit` megabytes (2^20 bytes), those are forgotten that are not renewed for the
    longest time.

    Corrections of gradients sum to zero over the nodes that get them, and may not over the nodes that reply. What is
    left over is the `surplus`, which the next corrections take back: see `fedbn_flwr.layerwise.carried`.
    """

    def __init__(self, trust: float, limit: float) -> None:
        self.trust, self.limit = trust, limit
        #: as they travel, and the node's number of samples; the most recent last
        self.by_node: dict[int, Arrays] = {}
        #: (2, C), what all corrections so far have added to the mean gradient of the averaged nodes
        self.surplus: np.ndarray | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what later corrections depend on beside the nodes' values."""
        return {"surplus": self.surplus}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.surplus = state["surplus"]

    def hear(self, node: int, num_examples: float, values: Mapping[str, np.ndarray]) -> None:
        """Keep a node's values; unusable ones are dropped with what is known of the node, and the log says why."""
        self.by_node.pop(node, None)
        kept = {name: np.array(value) for name, value in values.items()}
        if reason := _why_unusable(kept):
            log(WARNING, "Node %d goes without carried corrections: %s", node, reason)
            return
        self.by_node[node] = {**kept, _EXAMPLES: np.array(num_examples)}
        size = sum(value.nbytes for value in self.by_node[node].values())
        while len(self.by_node) > max(self.limit * 2**20 / size, 1):
            del self.by_node[next(iter(self.by_node))]

    def settle(self, corrections: Mapping[int, Arrays], silent: Iterable[int], averaged: Mapping[int, float]) -> None:
        """Forget the silent nodes of a round, and add up what the corrections of the averaged ones leave over.

        `averaged` are the weights of the nodes whose models are averaged.
        """
        for node in silent:
            self.by_node.pop(node, None)
        total = sum(averaged.values())
        added = [
            weight / total * corrections[node][_GRADIENTS].astype(np.float64)
            for node, weight in averaged.items()
            if _GRADIENTS in corrections.get(node, {})
        ]
        if added:
            self.surplus = np.sum([*added, self._surplus_like(added[0])], axis=0)

    def corrections(
        self, nodes: Iterable[int], weigh: Callable[[Examples], Sequence[float]]
    ) -> dict[int, dict[str, np.ndarray]]:
        """Return the entries of each participant's correction; a node that was never heard has none.

        `weigh` returns the weights of nodes with these numbers of samples, in their order.
        """
        heard = {node: self.by_node[node] for node in nodes if node in self.by_node}
        # a node whose forward pass went another way has other layers
        forms = {node: _form(values) for node, values in heard.items()}
        common = Counter(forms.values()).most_common(1)
        heard = {node: values for node, values in heard.items() if forms[node] == common[0][0]}
        weights = weigh({node: values[_EXAMPLES].item() for node, values in heard.items()}) if heard else []
        if not sum(weights) > 0:
            return {}
        first = next(iter(heard.values()))
        sizes = first[SIZES].copy()
        sizes[0] = sum(values[SIZES][0] for values in heard.values())
        corrections = {node: {LAYERS: first[LAYERS], SIZES: sizes} for node in heard}
        for kind in CORRECTIONS:
            if kind in first:
                rows = torch.from_numpy(np.stack([values[kind] for values in heard.values()]))
                corrected = carried_corrections(kind, rows, weights, self.trust).numpy()
                if kind == _GRADIENTS:
                    corrected -= self._surplus_like(corrected[0]).astype(corrected.dtype)
                for node, values in zip(heard, corrected, strict=True):
                    corrections[node][kind] = values
        return corrections

    def _surplus_like(self, gradients: np.ndarray) -> np.ndarray:
        """Return the surplus; zeros if there is none, or if the layers' channels have changed."""
        if self.surplus is None or self.surplus.shape != gradients.shape:
            return np.zeros(gradients.shape)
        return self.surplus


def _form(values: Mapping[str, np.ndarray]) -> Hashable:
    """Return the layers, their numbers of channels, and the dtypes."""
    dtypes = tuple(values[kind].dtype for kind in CORRECTIONS if kind in values)
    return values[LAYERS].tobytes(), values[SIZES][1:].tobytes(), dtypes


def _why_unusable(values: Mapping[str, np.ndarray]) -> str:
    """Return why these cannot be pooled with other nodes' values of the same BN layers; nothing if they can."""
    if not _are_of_layers(values):
        return "its carried values are not of BN layers"
    for kind in CORRECTIONS:
        if kind in values and (reason := why_unusable(kind, torch.from_numpy(values[kind]))):
            return f"the {kind} of its BN layers {reason}"
    return ""


def _are_of_layers(values: Mapping[str, np.ndarray]) -> bool:
    """Return whether the entries are there, with the dtypes and shapes of values of BN layers."""
    if not {LAYERS, SIZES, "statistics"} <= values.keys() <= {LAYERS, SIZES, *CORRECTIONS}:
        return False
    layers, sizes, statistics = values[LAYERS], values[SIZES], values["statistics"]
    gradients = values.get("gradients", np.zeros((2, 0), statistics.dtype))
    return (
        layers.dtype == np.uint8
        and {statistics.dtype, gradients.dtype} <= set(map(np.dtype, ("f2", "f4", "f8")))
        and sizes.shape == (3, 1 + np.count_nonzero(layers == ord("\n")))
        and np.issubdtype(sizes.dtype, np.integer)
        and bool((sizes[:2] > 0).all() and (sizes[2] >= 0).all())
        and statistics.shape == (2, sizes[1].sum())
        and gradients.shape == (2, sizes[2].sum())
    )
