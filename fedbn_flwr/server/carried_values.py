"""The nodes' last local values, from which the server makes corrections for an ordinary training message.

The client's half is `fedbn_flwr/client/carried_corrections.py`, the mathematics `fedbn_flwr/layerwise/carried.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from fedbn_flwr.layerwise import Kind, carried_corrections
from fedbn_flwr.server.averaging import Arrays
from fedbn_flwr.wire.carried import COUNTS

#: by node, its number of samples, or what else nodes are weighed by
Examples = Mapping[int, float]
_EXAMPLES = "examples"


class CarriedValues:
    """Each node's last local values of every BN layer, by node.

    With `memory` M > 0 they are averaged over rounds, M old + (1 - M) new. If all together take more than `limit`
    megabytes (2^20 bytes), those are forgotten that are not renewed for the longest time.
    """

    def __init__(self, memory: float, trust: float, limit: float) -> None:
        self.memory, self.trust, self.limit = memory, trust, limit
        #: as they travel, and the node's number of samples; the most recent last
        self.by_node: dict[int, Arrays] = {}

    def hear(self, node: int, num_examples: float, values: Mapping[str, np.ndarray]) -> None:
        """Keep a node's values; those that are no values of BN layers are dropped with what is known of the node."""
        before = self.by_node.pop(node, {})
        if not _is_sound(values):
            return
        kept = {name: np.array(value) for name, value in values.items()}
        if self.memory and _form(before) == _form(kept):
            for name in kept.keys() - {COUNTS}:
                kept[name] += (self.memory * (before[name] - kept[name])).astype(kept[name].dtype)
        self.by_node[node] = {**kept, _EXAMPLES: np.array(num_examples)}
        size = sum(value.nbytes for value in self.by_node[node].values())
        while len(self.by_node) > max(self.limit * 2**20 / size, 1):
            del self.by_node[next(iter(self.by_node))]

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
        counts = np.sum([values[COUNTS] for values in heard.values()], axis=0)
        corrections: dict[int, dict[str, np.ndarray]] = {node: {COUNTS: counts} for node in heard}
        kinds: tuple[Kind, Kind] = "statistics", "gradients"
        for kind in kinds:
            for node, entries in zip(heard, self._correct(kind, list(heard.values()), weights), strict=True):
                corrections[node] |= entries
        return corrections

    def _correct(self, kind: Kind, values: Sequence[Arrays], weights: Sequence[float]) -> list[Arrays]:
        """Return every node's corrections of one kind. All layers' channels stand side by side, as one layer's."""
        names = [name for name in values[0] if name.startswith(f"{kind}/")]
        if not names:
            return [{} for _ in values]
        rows = np.concatenate([np.stack([each[name] for each in values]) for name in names], axis=2)
        corrections = carried_corrections(kind, torch.from_numpy(rows), weights, self.trust).numpy()
        ends = list(accumulate(values[0][name].shape[1] for name in names))[:-1]
        layers = np.split(corrections, ends, axis=2)
        return [dict(zip(names, entries, strict=True)) for entries in zip(*layers, strict=True)]


def _form(values: Mapping[str, np.ndarray]) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return the layers and their numbers of channels."""
    return frozenset((name, value.shape) for name, value in values.items() if name != _EXAMPLES)


def _is_sound(values: Mapping[str, np.ndarray]) -> bool:
    """Whether these are finite values of BN layers, with variances that are not negative."""
    layers = {name: value for name, value in values.items() if name != COUNTS}
    counts = values.get(COUNTS, np.zeros(0))
    return (
        bool(layers)
        and counts.shape == (sum(name.startswith("statistics/") for name in layers),)
        and bool((counts > 0).all())
        and all(value.ndim == 2 and len(value) == 2 and np.isfinite(value).all() for value in layers.values())
        and all((value[1] >= 0).all() for name, value in layers.items() if name.startswith("statistics/"))
    )
