"""What the clients of a push reply: a message of each, or one of all where a strategy only
averages.

With the mean, the server receives as much from 1,000 nodes of a process as from 10, and averages as
many replies as there are processes. Sums are made in float64, of a stack on its device; the mean
has the dtypes of the replies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from flwr.app import Context, Message

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.client.passes import kind_of_pass
from fedbn_flwr.clientapp.bn_client_app import make_message
from fedbn_flwr.layerwise.exchange import LARGEST, MOST
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState, join
from fedbn_flwr.state.sums import Sums
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.pooled import Summed

#: messages by their places in a push; None where a reply is in the mean at another place
Replies = dict[int, Message | None]


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

    @property
    def has_mean(self) -> bool:
        """Whether the reply may be added to others."""
        return self.instruction.trains or kind_of_pass(self.instruction).is_mean

    @cached_property
    def steps(self) -> int:
        """The number of mini-batch steps; an error if the job cannot be planned."""
        return len(self.client.batch_sizes(self.instruction))


@dataclass(frozen=True)
class Trained:
    """Jobs whose clients have trained, and their replies: of one client, or those of a stack
    without records.
    """

    jobs: Sequence[Job]
    replies: Sequence[Reply]
    #: the records of a stack's replies, with a row for each client
    stacked: Mapping[str, State] = field(default_factory=dict)

    def messages(self) -> Replies:
        """Make a message of each client's reply, by place."""
        groups = {
            name: FlatState.copies_of(values, len(self.jobs))
            for name, values in self.stacked.items()
        }
        messages: Replies = {}
        for row, (job, reply) in enumerate(zip(self.jobs, self.replies, strict=True)):
            whole = replace(
                reply,
                records={**reply.records, **{name: rows[row] for name, rows in groups.items()}},
            )
            messages[job.place] = make_message(
                whole, job.message, copy=not changes_nothing(job.client)
            )
        return messages

    def rows(self) -> Mapping[str, State]:
        """Return the records with a row for each client, also where there is one client."""
        alone = self.replies[0].records
        single = {}
        for group, values in alone.items():
            single[group] = {name: value[None] for name, value in values.items()}
        return {**single, **self.stacked}


class ReplyPool:
    """The sum of the replies to the training messages of a push, where these can be added up.

    Arrays count by `weighting`, the option of strategies, "examples" or "uniform", and metrics by
    numbers of samples. Without a weighting nothing is added.
    """

    def __init__(self, weighting: str) -> None:
        self._weighting = weighting
        #: whose message the mean answers, and what it has in common with all that are added
        self._first: Job | None = None
        self._kind: Any = None
        #: by node, its partition and its number of samples
        self._nodes: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        #: by group of arrays; metrics are one more
        self._totals: dict[str, Sums] = {}

    def add(self, trained: Trained) -> Replies:
        """Take what clients reply; return messages by place, None where the mean will be the
        answer.

        What the server may have to refuse by name is not added, and neither is a stack with such a
        reply: numbers that are not finite, a weight of 0, or what is unlike the first replies.
        """
        counts = [reply.num_examples or 0 for reply in trained.replies]
        are_plain = all(changes_nothing(job.client) and job.has_mean for job in trained.jobs)
        if not (self._weighting and are_plain and 0 < min(counts) <= max(counts) <= MOST):
            return trained.messages()
        totals = self._totals_of(trained, counts)
        kind = trained.replies[0].report, {group: sums.layout for group, sums in totals.items()}
        # no weight is below 1: what is not finite, or too large, is so in the sum
        bounds = join([bound for sums in totals.values() for bound in sums.bounds()]).tolist()
        usable = all(abs(bound) <= LARGEST for bound in bounds)
        if not usable or self._kind not in (None, kind):
            return trained.messages()
        self._first = self._first or trained.jobs[0]
        self._kind = kind
        self._nodes |= {job.node: job.client.partition_id for job in trained.jobs}
        self._counts |= {job.node: count for job, count in zip(trained.jobs, counts, strict=True)}
        for group, sums in totals.items():
            if group in self._totals:
                self._totals[group].add(sums)
            else:
                self._totals[group] = sums
        return {job.place: None for job in trained.jobs}

    def mean(self) -> dict[int, Message]:
        """Return the mean, by the place of the message that it answers.

        There is none if nothing was added.
        """
        if self._first is None:
            return {}
        count = sum(self._counts.values())
        weight = count
        if self._weighting == "uniform":
            weight = len(self._counts)
        measured = self._totals.pop(wire.METRICS).mean(count)
        metrics: Any = {name: mean.tolist() for name, mean in measured.items()}
        means: dict[str, State] = {group: sums.mean(weight) for group, sums in self._totals.items()}
        # the least partition is the place of the mean among those of other processes
        metrics[wire.PARTITION_ID] = min(self._nodes.values())
        message = make_message(
            Reply(count, metrics, means, self._kind[0]), self._first.message, copy=False
        )
        message.content = content = Summed(dict(message.content))
        content.nodes = self._nodes
        content.counts = self._counts
        return {self._first.place: message}

    def _totals_of(self, trained: Trained, counts: Sequence[int]) -> dict[str, Sums]:
        weights = counts
        if self._weighting == "uniform":
            weights = [1] * len(counts)
        totals = {group: Sums(rows, tuple(weights)) for group, rows in trained.rows().items()}
        metrics = {}
        for name in trained.replies[0].metrics:
            column = [reply.metrics[name] for reply in trained.replies]
            metrics[name] = torch.tensor(column, dtype=torch.float64)
        return {**totals, wire.METRICS: Sums(metrics, tuple(counts))}


def changes_nothing(client: BNClient) -> bool:
    """Whether a client surely changes no tensor that it received or replied, so that none needs to
    be copied.
    """
    return type(client) is BNClient
