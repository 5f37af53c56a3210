"""Pooling: what nodes send beside the model, and a round's replies as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from logging import WARNING
from statistics import median
from typing import Any, ClassVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from fedbn_flwr import norm, wire
from fedbn_flwr.layerwise.exchange import Combiner, combine, to_shares
from fedbn_flwr.norm import Moments
from fedbn_flwr.server.replies import NodeReply, Refusal
from fedbn_flwr.state import Arrays
from fedbn_flwr.state.flat import FlatArrays, portions

States = Sequence[Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Sent:
    """Something that nodes send beside the model."""

    #: in words, for refusals
    what: str
    #: whether a robust rule stands in the place of its mean
    is_robust: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class PooledGroup(Sent):
    """A group of arrays in training replies, under names of the model's entries, whose mean a
    method gets.
    """

    #: the name of the ArrayRecord
    record: str
    #: whether a reply without it is refused; if not, it is pooled in rounds in which all replies
    #: hold it
    is_required: bool = field(default=True, kw_only=True)


#: what `momentum_state="global"` pools
MOMENTUM = PooledGroup("the optimizer's state", wire.MOMENTUM, is_required=False, is_robust=False)


@dataclass(frozen=True)
class Pooled:
    """A round's replies, pooled into one."""

    #: the mean of the entries that nodes sent, or what averager and server optimizer make of them
    model: Arrays
    #: the means of the groups, by their records' names
    groups: Mapping[str, Arrays]
    #: by node
    weights: Mapping[int, float]
    #: each node's own, if the method `reads_replies`; otherwise they may be means of several nodes
    replies: Sequence[NodeReply]


@dataclass(frozen=True)
class Start:
    """What the models of a round started from."""

    server_round: int
    state: Mapping[str, NDArray[Any]]
    #: returns the entries that are parameters, and further names of entries with the first name of
    #: each; its argument says who needs them, for an error
    parameters: Callable[[str], tuple[frozenset[str], Mapping[str, str]]]


class Averager:
    """Makes one of nodes' numbers: here their weighted mean.

    Subclasses put something else in its place.
    """

    #: whether it needs each node's own numbers, so that stacks must not average
    reads_replies: ClassVar[bool] = False

    @property
    def fewest_nodes(self) -> int:
        """Return the number of usable replies below which a round leaves the model as it was."""
        return 1

    def refuse_few(self, nodes: int, server_round: int, what: str = "models") -> list[Refusal]:
        """Say in the log why values of so few nodes are not pooled, and return it.

        The text is empty if they are pooled.
        """
        return []

    def refuse(self, method: str, sent: Sent) -> None:
        """Raise ValueError if nodes of the method send what this does not reach."""

    def refuse_weighting(self, weighting: str) -> None:
        """Raise ValueError if this does not go with these weights of nodes."""

    def average(
        self, states: States, weights: Sequence[float], start: Start | None = None
    ) -> Arrays:
        """Return the mean of states with equal entries; models also have a `start`."""
        return average(states, weights)

    @property
    def combiner(self) -> Combiner:
        """Return what makes one of nodes' statistics, or of their gradients, of a BN layer."""
        return combine

    def unite(self, seen: Sequence[Mapping[str, Moments]], server_round: int) -> dict[str, Moments]:
        """Return the moments of all nodes' samples together, by BN layer."""
        return norm.pool_moments(seen)


def pool_groups(
    replies: Sequence[NodeReply],
    weights: Sequence[float],
    groups: Iterable[PooledGroup],
    averager: Averager,
) -> dict[str, Arrays]:
    """Return the means of the groups, by their records' names.

    A group that not all replies hold has none.
    """
    means = {}
    for group in groups:
        states = [reply.records.get(group.record, {}) for reply in replies]
        means[group.record] = averager.average(states, weights) if all(states) else {}
    return means


def weights_by_node(
    replies: Sequence[NodeReply], weights: Sequence[float], weighting: str
) -> dict[int, float]:
    """Return every node's weight.

    The nodes of a sum have weighted it by their counts, or equally.
    """
    by_node = dict[int, float]()
    for reply, weight in zip(replies, weights, strict=True):
        if weighting == "examples" and len(reply.nodes) > 1 and reply.counts:
            by_node |= reply.counts
        else:
            by_node |= dict.fromkeys(reply.nodes, weight / len(reply.nodes))
    return by_node


def name_dominant(weights: Mapping[int, float], what: str) -> None:
    """Warn of nodes with more than ten times the median weight, and more than all up to that
    together: they may lie.
    """
    positive = [weight for weight in weights.values() if weight > 0]
    limit = 10 * median(positive or [0])
    most = max(limit, sum(weight for weight in positive if weight <= limit))
    text = "Node %d outweighs the others in %s: it counts %g, and ten times the median is %g"
    for node in [node for node, weight in weights.items() if weight > most]:
        log(WARNING, text, node, what, weights[node], limit)


def average(states: Sequence[Mapping[str, NDArray[Any]]], weights: Sequence[float]) -> Arrays:
    """The weighted mean of every array, in the array's own dtype.

    Sums are formed in float64. Integers and booleans (BN's batch counters) are not measurements to
    be averaged: the largest is taken, so that a 0-d int64 counter stays one and never runs
    backwards.
    """
    shares = to_shares(weights)
    flat = [_flat(state) for state in states]
    first = flat[0]
    if any(state.layout is not first.layout for state in flat):
        return {name: _mean((state[name] for state in states), shares) for name in first}
    means = {}
    for dtype in first.buffers:
        means[dtype] = _mean_run([state.buffers[dtype] for state in flat], shares)
    return dict(FlatArrays(first.layout, means).items())


def _flat(state: Mapping[str, NDArray[Any]]) -> FlatArrays:
    if isinstance(state, FlatArrays):
        return state
    return FlatArrays.copy_of(state)


def is_floating(array: NDArray[Any]) -> bool:
    """Whether the numbers can be averaged: floating-point numbers, not counts."""
    return array.dtype.kind == "f"


def _mean_run(runs: Sequence[NDArray[Any]], shares: Sequence[float]) -> NDArray[Any]:
    """Of runs of numbers, by portions; number by number the same sums as of the arrays in them."""
    means = []
    for part in portions(runs[0]):
        means.append(_mean((run[part] for run in runs), shares))
    return np.concatenate(means or [runs[0][:]])


def _mean(values: Iterable[NDArray[Any]], shares: Sequence[float]) -> NDArray[Any]:
    ahead = iter(values)
    first = next(ahead)
    if not is_floating(first):
        return np.asarray(reduce(np.maximum, ahead, first), dtype=first.dtype)
    total = np.zeros(first.shape, np.float64)
    for value, share in zip(chain([first], ahead), shares, strict=True):
        total += np.asarray(value, np.float64) * share
    return np.asarray(total, dtype=first.dtype)
