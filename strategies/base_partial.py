"""Strategies in which a part of the model never leaves the client."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, Message, MetricRecord

from fedbn_flwr import wire
from fedbn_flwr.server.averaging import Arrays, average
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.state.records import make_record
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg


class PartialSharing(FedAvg):
    """FedAvg over the shared entries; each node keeps the entries of the group `stays` in its own `Context.state`.

    Which entries belong to the group is known by the client, which has the model. The server learns it from the
    replies: a node gets the whole state until it has answered once, and from then on only what it shares. A node
    that comes late, or lost its memory, so starts from the server's values of the entries that stay: the initial
    ones, or with `mean_personal=True` the mean of what the nodes held at their last evaluation. The latter makes nodes
    send these entries when they evaluate (never in training), as FedBS does to test FedBN on a node without data.
    """

    personal: ClassVar[bool] = True
    stays: ClassVar[str] = "none"

    def __init__(
        self,
        *,
        mean_personal: Annotated[
            bool, "let nodes send the entries they keep when they evaluate, to test their mean"
        ] = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.mean_personal = mean_personal
        self._shared: frozenset[str] | None = None
        self._served: set[int] = set()
        self._mean: Arrays = {}

    def instruct(self, instruction: Instruction) -> Instruction:
        """Keep the group local."""
        return replace(super().instruct(instruction), keep_local=self.stays)

    def instruct_evaluation(self, instruction: Instruction) -> Instruction:
        """Evaluate with the node's own entries."""
        instruction = super().instruct_evaluation(instruction)
        return replace(instruction, keep_local=self.stays, send_personal=self.mean_personal)

    def package(self, node: int, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """The whole state for a node that has none of its own, the shared entries for the others."""
        groups = super().package(node, arrays)
        if self._shared is not None and node in self._served:
            whole = groups[self.arrayrecord_key]
            shared = {name: array for name, array in whole.items() if name in self._shared}
            groups[self.arrayrecord_key] = make_record(shared)
        return groups

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Average what is shared; the server's values of the rest are the nodes' mean, where it is known."""
        self._shared = frozenset(replies[0].arrays)
        return {**super().merge(replies, weights), **self._mean}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; a node that failed may have lost its memory, so it gets the whole state next time."""
        result = super().aggregate_train(server_round, replies)
        self._served -= {message.metadata.dst_node_id for message in self._sent}
        self._served |= {reply.node for reply in self.train_replies}
        return result

    def personal_mean(self) -> Arrays:
        """The mean of the entries that the nodes held at the last evaluation, weighted as in training.

        Empty unless `mean_personal` asks the nodes to send them.
        """
        sent = [reply for reply in self.evaluate_replies if reply.records.get(wire.PERSONAL)]
        if sent:
            self._mean = average([reply.records[wire.PERSONAL] for reply in sent], self.weigh(sent))
        return self._mean
