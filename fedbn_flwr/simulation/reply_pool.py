"""The replies of a push as one, where a strategy only averages: what the server does next, done where clients train.

The server then receives as much from 1,000 nodes of a process as from 10, and averages as many replies as there are
processes. Sums are made in float64, of a stack on its device; the mean has the dtypes of the replies.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fedbn_flwr import wire
from fedbn_flwr.client import Reply
from fedbn_flwr.clientapp.bn_client_app import make_message
from fedbn_flwr.layerwise.exchange import LARGEST, MOST
from fedbn_flwr.simulation.jobs import Trained, changes_nothing
from fedbn_flwr.state.flat import FlatArrays, FlatState
from fedbn_flwr.wire.pooled import Summed


@dataclass
class Sum:
    """Replies that are alike, added up under their weights; metrics under the numbers of samples."""

    #: the first place among the replies, and its message
    place: int
    message: Message
    report: dict[str, Any]
    #: by node, its partition and its number of samples
    nodes: dict[int, int]
    counts: dict[int, int]
    weight: float
    records: dict[str, FlatArrays]
    metrics: dict[str, NDArray[np.float64]]

    @property
    def kind(self) -> Hashable:
        """What replies have in common that can be added: arrays, metrics, and what their clients obeyed."""
        layouts = tuple((group, arrays.layout.entries) for group, arrays in sorted(self.records.items()))
        lengths = tuple((name, total.shape) for name, total in sorted(self.metrics.items()))
        return layouts, lengths, _obeyed(self.report)

    def add(self, other: "Sum") -> None:
        """Add replies of the same kind."""
        if other.place < self.place:
            self.place, self.message = other.place, other.message
        self.nodes |= other.nodes
        self.counts |= other.counts
        self.weight += other.weight
        for group, arrays in self.records.items():
            for dtype, total in arrays.buffers.items():
                join = np.add if dtype.kind == "f" else np.maximum
                join(total, other.records[group].buffers[dtype], out=total)
        for name in self.metrics:
            self.metrics[name] = self.metrics[name] + other.metrics[name]

    def mean(self) -> Message:
        """Return the mean, as the answer to the message."""
        count = sum(self.counts.values())
        metrics: dict[str, Any] = {name: (total / count).tolist() for name, total in self.metrics.items()}
        # the least partition is the place of the mean among those of other processes
        metrics[wire.PARTITION_ID] = min(self.nodes.values())
        records = {group: self._mean_of(arrays) for group, arrays in self.records.items()}
        message = make_message(Reply(count, metrics, records, self.report), self.message, copy=False)
        message.content = content = Summed(dict(message.content))
        content.nodes, content.counts = self.nodes, self.counts
        return message

    def _mean_of(self, arrays: FlatArrays) -> FlatState:
        means = {
            dtype: (total / self.weight).astype(dtype) if dtype.kind == "f" else total
            for dtype, total in arrays.buffers.items()
        }
        return FlatState(arrays.layout, means)


class ReplyPool:
    """The replies to training messages of a push: those that can be added, and messages of the others.

    Arrays count by `weighting`, the option of strategies, "examples" or "uniform"; without one nothing is added.
    """

    def __init__(self, weighting: str) -> None:
        self._weighting = weighting
        self._sums: dict[Hashable, Sum] = {}

    def add(self, trained: Trained) -> dict[int, Message | None]:
        """Take what clients reply; return messages by place, None where a mean will be the answer.

        What the server may have to refuse by name is not added, and neither is a stack with such a reply: numbers that
        are not finite, or a weight of 0.
        """
        if (added := self._sum_of(trained)) is None:
            return trained.messages()
        if (known := self._sums.setdefault(added.kind, added)) is not added:
            known.add(added)
        return {job.place: None for job in trained.jobs}

    def means(self) -> dict[int, Message]:
        """Return the means, each in the first place of the replies that are in it."""
        return {each.place: each.mean() for each in self._sums.values()}

    def _sum_of(self, trained: Trained) -> Sum | None:
        jobs, replies = trained.jobs, trained.replies
        counts = [reply.num_examples or 0 for reply in replies]
        if (
            not self._weighting
            or len({_form(reply) for reply in replies}) > 1
            or not 0 < min(counts) <= max(counts) <= MOST
        ):
            return None
        if not all(changes_nothing(job.client) for job in jobs):
            return None
        weights = tuple(1.0 if self._weighting == "uniform" else float(count) for count in counts)
        records = {group: FlatState.sum_of(values, weights) for group, values in trained.rows().items()}
        names = replies[0].metrics.keys() - {wire.PARTITION_ID}
        metrics = {name: counts @ np.array([reply.metrics[name] for reply in replies], np.float64) for name in names}
        totals = [total for arrays in records.values() for dtype, total in arrays.buffers.items() if dtype.kind == "f"]
        if not (_are_usable(totals, min(weights)) and _are_usable(metrics.values(), min(counts))):
            return None
        first = min(jobs, key=lambda job: job.place)
        nodes = {job.node: int(reply.metrics[wire.PARTITION_ID]) for job, reply in zip(jobs, replies, strict=True)}
        by_node = dict(zip(nodes, counts, strict=True))
        return Sum(first.place, first.message, replies[0].report, nodes, by_node, sum(weights), records, metrics)


def _form(reply: Reply) -> Hashable:
    lengths = tuple((name, np.shape(value)) for name, value in sorted(reply.metrics.items()))
    return lengths, _obeyed(reply.report)


def _obeyed(report: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(report.get(wire.OBEYED, [])))


def _are_usable(totals: Iterable[NDArray[Any]], least: float) -> bool:
    """Whether no number in these sums is infinite, none, or too large, each of which had at least this weight."""
    return all((abs(total) <= LARGEST * least).all() for total in totals)
