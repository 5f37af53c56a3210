"""What the clients of a push reply: a message of each, or one of all where a strategy only averages.

With the mean, the server receives as much from 1,000 nodes of a process as from 10, and averages as many replies as
there are processes. Sums are made in float64, of a stack on its device; the mean has the dtypes of the replies.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp.bn_client_app import make_message
from fedbn_flwr.layerwise.exchange import LARGEST, MOST
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatArrays, FlatState
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.pooled import Summed


@dataclass(frozen=True)
class Job:
    """The work of one training message; `place` is the message's position in the push."""

    place: int
    message: Message
    context: Context
    client: BNClient
    received: Mapping[str, State]
    instruction: Instruction

    @property
    def node(self) -> int:
        """The node that the message is for."""
        return self.message.metadata.dst_node_id

    @cached_property
    def steps(self) -> int:
        """The number of mini-batch steps; an error if the job cannot be planned."""
        return len(self.client.batch_sizes(self.instruction))


@dataclass(frozen=True)
class Trained:
    """Jobs whose clients have trained, and their replies: of one client, or those of a stack without records."""

    jobs: Sequence[Job]
    replies: Sequence[Reply]
    #: the records of a stack's replies, with a row for each client
    stacked: Mapping[str, State] = field(default_factory=dict)

    def messages(self) -> dict[int, Message | None]:
        """Make a message of each client's reply, by place."""
        groups = {name: FlatState.copies_of(values, len(self.jobs)) for name, values in self.stacked.items()}
        messages: dict[int, Message | None] = {}
        for row, (job, reply) in enumerate(zip(self.jobs, self.replies, strict=True)):
            whole = replace(reply, records={**reply.records, **{name: rows[row] for name, rows in groups.items()}})
            messages[job.place] = make_message(whole, job.message, copy=not changes_nothing(job.client))
        return messages

    def rows(self) -> Mapping[str, State]:
        """Return the records with a row for each client, also where there is one client."""
        alone = self.replies[0].records
        single = {group: {name: value[None] for name, value in values.items()} for group, values in alone.items()}
        return {**single, **self.stacked}


@dataclass
class Sum:
    """Replies that are alike, added up under their weights: arrays by group, and as one more group the metrics."""

    #: whose message the mean answers
    first: Job
    report: dict[str, Any]
    #: by node, its partition and its number of samples
    nodes: dict[int, int]
    counts: dict[int, int]
    weights: dict[str, float]
    totals: dict[str, FlatArrays]

    @property
    def kind(self) -> Hashable:
        """What replies have in common that can be added: names and forms, and what their clients obeyed."""
        forms = tuple((group, arrays.layout.entries) for group, arrays in sorted(self.totals.items()))
        return forms, tuple(sorted(self.report.get(wire.OBEYED, [])))

    @property
    def is_usable(self) -> bool:
        """Whether no reply had numbers that are not finite or too large; none had a weight below 1."""
        return all(
            (abs(total) <= LARGEST).all() for arrays in self.totals.values() for total in arrays.buffers.values()
        )

    def add(self, other: "Sum") -> None:
        """Add replies of the same kind."""
        self.nodes |= other.nodes
        self.counts |= other.counts
        for group, arrays in self.totals.items():
            self.weights[group] += other.weights[group]
            for dtype, total in arrays.buffers.items():
                join = np.add if dtype.kind == "f" else np.maximum
                join(total, other.totals[group].buffers[dtype], out=total)

    def mean(self) -> Message:
        """Make a message of the mean."""
        means = {group: self._mean(group) for group in self.totals}
        metrics = {name: value.tolist() for name, value in means.pop(wire.METRICS).items()}
        # the least partition is the place of the mean among those of other processes
        metrics[wire.PARTITION_ID] = min(self.nodes.values())
        reply = Reply(sum(self.counts.values()), metrics, dict(means), self.report)
        message = make_message(reply, self.first.message, copy=False)
        message.content = content = Summed(dict(message.content))
        content.nodes, content.counts = self.nodes, self.counts
        return message

    def _mean(self, group: str) -> FlatState:
        buffers, weight = self.totals[group].buffers, self.weights[group]
        means = {
            dtype: (total / weight).astype(dtype) if dtype.kind == "f" else total for dtype, total in buffers.items()
        }
        return FlatState(self.totals[group].layout, means)


class ReplyPool:
    """The replies to the training messages of a push: those that can be added up, and messages of the others.

    Arrays count by `weighting`, the option of strategies, "examples" or "uniform", and metrics by numbers of samples.
    Without a weighting nothing is added.
    """

    def __init__(self, weighting: str) -> None:
        self._weighting = weighting
        self._sums: dict[Hashable, Sum] = {}

    def add(self, trained: Trained) -> dict[int, Message | None]:
        """Take what clients reply; return messages by place, None where a mean will be the answer.

        What the server may have to refuse by name is not added, and neither is a stack with such a reply: numbers that
        are not finite, or a weight of 0.
        """
        counts = [reply.num_examples or 0 for reply in trained.replies]
        can_be_added = (
            all(changes_nothing(job.client) for job in trained.jobs) and 0 < min(counts) <= max(counts) <= MOST
        )
        if not (self._weighting and can_be_added and (added := self._sum_of(trained, counts)).is_usable):
            return trained.messages()
        if (known := self._sums.setdefault(added.kind, added)) is not added:
            known.add(added)
        return {job.place: None for job in trained.jobs}

    def means(self) -> dict[int, Message]:
        """Return the mean of each kind, in the place of the first of its replies."""
        return {each.first.place: each.mean() for each in self._sums.values()}

    def _sum_of(self, trained: Trained, counts: Sequence[int]) -> Sum:
        jobs, replies = trained.jobs, trained.replies
        weights = [1] * len(counts) if self._weighting == "uniform" else counts
        groups = {group: (rows, weights) for group, rows in trained.rows().items()}
        names = replies[0].metrics.keys() - {wire.PARTITION_ID}
        columns = {name: [reply.metrics[name] for reply in replies] for name in sorted(names)}
        metrics = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
        groups[wire.METRICS] = metrics, counts
        return Sum(
            jobs[0],
            replies[0].report,
            {job.node: job.client.partition_id for job in jobs},
            {job.node: count for job, count in zip(jobs, counts, strict=True)},
            {group: sum(column) for group, (_, column) in groups.items()},
            {group: FlatState.sum_of(rows, tuple(column)) for group, (rows, column) in groups.items()},
        )


def changes_nothing(client: BNClient) -> bool:
    """Whether a client surely changes no tensor that it received or replied, so that none needs to be copied."""
    return type(client) is BNClient
