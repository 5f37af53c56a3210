"""Strategies in which a part of the model never leaves the client."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from logging import WARNING
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.averaging import Arrays, record
from fedbn_flwr.server.replies import NodeReply, Pooled, lacks_state
from fedbn_flwr.state.records import make_record
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg


class PartialSharing(FedAvg):
    """FedAvg over the shared entries; each node keeps the entries of the group `stays` in its own `Context.state`.

    Which entries belong to the group is known by the client, which has the model. The server learns it from the
    replies: a node gets the whole state until it has answered once, and from then on only what it shares. A node
    that comes late, or lost its memory, so starts from the server's values of the entries that stay: the initial
    ones, or with `mean_personal=True` the mean of what the last round's participants hold, under the weights of their
    models. The latter makes nodes send these entries when they evaluate (never in training). FedBS tests FedBN so, on a
    node without data: with "the average of the mean and the variance learned in the previous round". A node that did
    not take part has learned nothing in it, and one that never did holds initial statistics.
    """

    personal: ClassVar[bool] = True
    stays: ClassVar[str] = "none"
    kept: ClassVar[tuple[str, ...]] = ("_shared", "_mean")
    kept_by_node: ClassVar[tuple[str, ...]] = ("_served", "_participants")

    def __init__(
        self,
        *,
        mean_personal: Annotated[
            bool, "in evaluations, also send the entries that nodes keep, to test their mean"
        ] = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.privacy and mean_personal:
            raise ValueError("privacy would not protect the entries that nodes keep: mean_personal must be False")
        self.mean_personal = mean_personal
        if mean_personal:
            self.why_single = self.why_single or "mean_personal averages what single nodes keep"
        self._shared: AbstractSet[str] | None = None
        self._served: set[int] = set()
        #: the weights of the last round's participants, by node
        self._participants: dict[int, float] = {}
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
        # under masks, all nodes must get the same
        nodes = self.round.nodes if self.secure else [node]
        if self._shared is not None and self._served.issuperset(nodes):
            whole = groups[self.arrayrecord_key]
            shared = {name: array for name, array in whole.items() if name in self._shared}
            groups[self.arrayrecord_key] = make_record(shared)
        return groups

    def update(self, pooled: Pooled) -> Arrays:
        """Average what is shared; the server's values of the rest are the participants' mean, where it is known."""
        self._shared, self._participants = set(pooled.groups[wire.ARRAYS]), dict(pooled.weights)
        self.lose_round()
        self._served |= pooled.weights.keys()
        return {**super().update(pooled), **self._mean}

    def lose_round(self) -> None:
        """Send nodes that failed the whole state next time: they may have lost their memory."""
        self._served -= set(self.round.nodes)

    def collect(self, replies: Iterable[Message]) -> list[Message]:
        """Let nodes that have lost their entries train from the server's, in this round; return all replies."""
        usable, nodes = list[Message](), list[int]()
        sent = {message.metadata.message_id: message.metadata.dst_node_id for message in self._sent}
        for reply in super().collect(replies):
            if lacks_state(reply):
                nodes.append(sent.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id))
            else:
                usable.append(reply)
        if not nodes:
            return usable
        log(WARNING, "Nodes %s have lost the entries that stay on them: they get the whole model", sorted(nodes))
        self._served -= set(nodes)
        again = [self._with_whole_model(message) for message in self._sent if message.metadata.dst_node_id in nodes]
        self._sent = [message for message in self._sent if message.metadata.dst_node_id not in nodes] + again
        return [*usable, *ask_nodes(self.grid, again, self.exchange_timeout).values()]

    def _with_whole_model(self, message: Message) -> Message:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        config = message.content[self.configrecord_key]
        return Message(
            RecordDict({**self.package(node, record(self.current)), self.configrecord_key: config}), node, kind
        )

    def learn_from_evaluation(self, replies: Sequence[NodeReply]) -> None:
        """Average what the last round's participants hold, if they have sent it."""
        sent = [reply for reply in replies if reply.records.get(wire.PERSONAL)]
        learned = [reply for reply in sent if reply.node in self._participants]
        if len(learned) >= self.fewest_nodes:
            weights = [self._participants[reply.node] for reply in learned]
            self._mean = self.mean([reply.records[wire.PERSONAL] for reply in learned], weights)

    def untrained(self) -> list[str]:
        """Return the entries that stay on the nodes, unless the nodes' mean is in their places."""
        if self._shared is None:
            return []
        known = {*self._shared, *self._mean}
        return [name for name in self.current if name not in known]

    def personal_mean(self) -> Arrays:
        """Return the mean of the entries that the last round's participants held at the last evaluation.

        Empty unless `mean_personal` asks the nodes to send them.
        """
        return self._mean
