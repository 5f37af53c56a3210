"""Rules in place of the mean, for runs in which some nodes may send wrong numbers: Flower's, by
entries' names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from math import ceil
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.layerwise.exchange import Combiner, Kind
from fedbn_flwr.norm import Moments
from fedbn_flwr.server.pooling import Averager, Sent, Start, States, average, is_floating
from fedbn_flwr.server.replies import Refusal
from fedbn_flwr.state import Arrays

#: by the name of a rule, what its number is; the median has none
RULES = {
    "trimmed": "the share of nodes to leave out at each end, above 0 and below 0.5",
    "median": "",
    "multi-krum": "the number of lying nodes, at least 1",
    "norm": "the largest update, in multiples of the median node's, above 0",
}


@dataclass(frozen=True)
class Robust(Averager):
    r"""A rule for K nodes' values x_1 ... x_K of which some may be wrong.

    Written `median` or `NAME:NUMBER`.

    - `trimmed:B`: number by number, the mean without the int(B K) smallest and the int(B K)
      largest (Yin et al., Byzantine-Robust Distributed Learning, ICML 2018),
    - `median`: number by number, the median (the same paper),
    - `multi-krum:F`: the mean over the K - F nodes whose K - F - 2 nearest others are the nearest,
      in squared Euclidean distance (Blanchard et al., Machine Learning with Adversaries, NeurIPS
      2017),
    - `norm:C`: the mean of r + min(1, C L / |x_k - r|) (x_k - r), array by array, L being the
      median of the nodes' |x_k - r|. Of a model r is the state that the round started from;
      otherwise it is the median of the values.

    Nodes count equally under every rule, because a number of samples is a node's own word.
    Floating-point entries are combined in float64 and keep their dtype; of a counter, the largest
    is taken.

    Means m_k and variances v_k of mini-batches are pooled as without a rule, with the rule in place
    of both sums:

        mean = rule(m_k),   variance = rule(v_k + (m_k - mean)^2)

    which is at least 0 under every rule. Krum's distances are then between the nodes' whole rows.
    """

    name: str
    number: float = 0.0
    reads_replies: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str) -> "Robust":
        """Read a rule; ValueError says how rules are written."""
        name, colon, number = text.partition(":")
        if name not in RULES:
            raise ValueError(f"unknown robust rule {name!r}; known: none, {', '.join(RULES)}")
        if not RULES[name]:
            if colon:
                raise ValueError(f"robust={name} takes no number, got {text!r}")
            return cls(name)
        try:
            rule = cls(name, float(number))
        except ValueError:
            rule = cls(name)
        upper = 0.5 if name == "trimmed" else np.inf
        is_count = name not in ("trimmed", "norm")
        if not 0 < rule.number < upper or (is_count and not rule.number.is_integer()):
            raise ValueError(f"robust={name}:NUMBER needs {RULES[name]}, got {text!r}")
        return rule

    def __str__(self) -> str:
        if self.number:
            return f"{self.name}:{self.number:g}"
        return self.name

    def refuse_few(self, nodes: int, server_round: int, what: str = "models") -> list[Refusal]:
        """Say in the log why values of so few nodes are not pooled, and return it.

        The text is empty if they are pooled.
        """
        missing = self.fewest_nodes - nodes
        if nodes == 0 or missing <= 0:
            return []
        why = (
            f"robust={self} needs {what} of {self.fewest_nodes} nodes, and has {nodes}: "
            f"{missing} missing"
        )
        log(WARNING, "Round %d: %s", server_round, why)
        return [Refusal(0, why)]

    def refuse(self, method: str, sent: Sent) -> None:
        """Refuse what has no mean that the rule could replace."""
        if not sent.is_robust:
            raise ValueError(f"a robust rule would not reach {sent.what}, which {method} shares")

    @property
    def fewest_nodes(self) -> int:
        """Return the number of nodes below which the rule does not do what it is for."""
        by_number = {
            "trimmed": ceil(1 / (self.number or 1)),
            "multi-krum": int(2 * self.number) + 3,
        }
        return by_number.get(self.name, 3)

    def average(
        self, states: States, weights: Sequence[float], start: Start | None = None
    ) -> Arrays:
        """Return what takes the place of the states' mean; nodes count equally."""
        names = [name for name in states[0] if is_floating(states[0][name])]
        if self.name == "multi-krum" and names:
            distances = np.sum([_squared_distances(_rows(states, name)) for name in names], axis=0)
            states = [states[index] for index in self._nearest(distances)]
        means = {}
        for name in names:
            before = None if start is None else start.state[name]
            means[name] = self._middle(_rows(states, name), before)
        others = []
        for state in states:
            others.append({name: state[name] for name in state if name not in means})
        counters = average(others, [1.0] * len(states))
        merged = {**means, **counters}
        return {name: np.asarray(merged[name], array.dtype) for name, array in states[0].items()}

    @property
    def combiner(self) -> Combiner:
        """Return the rule for a BN layer."""
        return self.combine

    def combine(self, kind: Kind, rows: Tensor, weights: Sequence[float]) -> Tensor:
        """Combine the clients' rows of one BN layer, as the mean does without a rule."""
        values = rows.double().numpy(force=True)
        if self.name == "multi-krum":
            values = values[self._nearest(_squared_distances(values))]
        if kind != "statistics":
            return torch.from_numpy(self._middle(values)).to(rows)
        means = values[:, 0]
        variances = values[:, 1]
        mean = self._middle(means)
        variance = self._middle(variances + np.square(means - mean))
        return torch.from_numpy(np.stack([mean, variance])).to(rows)

    def unite(self, seen: Sequence[Mapping[str, Moments]], server_round: int) -> dict[str, Moments]:
        """Return what takes the place of the moments of all samples together; none of fewer nodes
        than it needs.
        """
        united: dict[str, Moments] = {}
        if not seen or self.refuse_few(len(seen), server_round, "gathered statistics"):
            return united
        for layer in seen[0]:
            each = [values[layer] for values in seen]
            rows = torch.stack([torch.stack([own.mean, own.variance]) for own in each])
            united[layer] = Moments(
                sum(own.count for own in each), *self.combine("statistics", rows, [])
            )
        return united

    def _nearest(self, distances: NDArray[Any]) -> list[int]:
        """Return the nodes, in their order, that are nearest to the others.

        Distances are squared, from each node to each.
        """
        count = len(distances) - int(self.number)
        others = max(count - 2, 1)
        scores = np.sort(distances, axis=1)[:, 1 : others + 1].sum(axis=1)
        return sorted(np.argsort(scores, kind="stable")[:count].tolist())

    def _middle(self, rows: NDArray[Any], current: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return what takes the place of the mean of rows, of the shape of one."""
        if self.name == "median":
            return np.asarray(np.median(rows, axis=0))
        if self.name == "trimmed":
            cut = int(self.number * len(rows))
            return np.asarray(np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0))
        if self.name == "norm":
            if current is None:
                start = np.median(rows, axis=0)
            else:
                start = current.astype(np.float64)
            updates = (rows - start).reshape(len(rows), -1)
            lengths = np.linalg.norm(updates, axis=1)
            largest = self.number * np.median(lengths)
            shares = np.divide(largest, lengths, out=np.ones(len(rows)), where=lengths > largest)
            return np.asarray(start + (shares @ updates / len(rows)).reshape(start.shape))
        return np.asarray(rows.mean(axis=0))


def _rows(states: States, name: str) -> NDArray[Any]:
    """Return an entry of all states in float64, a row for each."""
    return np.stack([np.asarray(state[name], np.float64) for state in states])


def _squared_distances(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the squared Euclidean distance of each row to each."""
    flat = rows.reshape(len(rows), -1)
    return np.stack([np.square(flat - one).sum(axis=1) for one in flat])
