"""Strategies in which a part of the model never leaves the client: BN, its statistics, its affine part, or all."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from logging import WARNING
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.averaging import Arrays, arrays_to_record
from fedbn_flwr.server.replies import Group, NodeReply, Pooled, lacks_state
from fedbn_flwr.state.records import make_record
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


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
        self.mean_personal = mean_personal
        if mean_personal:
            self.add_group(Group("the entries that nodes keep, for mean_personal", by_node=True))
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
        if self._shared is not None and node in self._served:
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
        replies = list(super().collect(replies))
        nodes = {reply.metadata.src_node_id for reply in replies if lacks_state(reply)}
        if not nodes:
            return replies
        log(WARNING, "Nodes %s have lost the entries that stay on them: they get the whole model", sorted(nodes))
        self._served -= nodes
        sent, again, whole = list[Message](), list[Message](), arrays_to_record(self.current)
        for message in self._sent:
            if (node := message.metadata.dst_node_id) in nodes:
                content = RecordDict({**message.content, **self.package(node, whole)})
                again.append(Message(content, node, message.metadata.message_type))
            else:
                sent.append(message)
        self._sent = sent + again
        usable = [reply for reply in replies if not lacks_state(reply)]
        return [*usable, *ask_nodes(self.grid, again, self.exchange_timeout).values()]

    def learn_from_evaluation(self, replies: Sequence[NodeReply]) -> None:
        """Average what the last round's participants hold, if they have sent it."""
        sent = [reply for reply in replies if reply.records.get(wire.PERSONAL)]
        learned = [reply for reply in sent if reply.node in self._participants]
        if learned and not self.refuse_few(len(learned), "kept entries"):
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


@register_strategy("fedbn")
class FedBN(PartialSharing):
    """BN layers stay on the client, affine parameters and statistics; everything else is averaged.

    X. Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

    A model without BN, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "X. Li et al., ICLR 2021, arXiv:2102.07623"
    leaves: ClassVar[str] = "everything but BN"
    use: ClassVar[str] = "each node keeps a model for its own domain"
    stays: ClassVar[str] = "bn"
    needs: str = "bn"


@register_strategy("silobn")
class SiloBN(PartialSharing):
    """BN statistics stay on the client; affine parameters are averaged with everything else.

    Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART 2020.

    A model without BN statistics, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "Andreux et al., DART 2020"
    leaves: ClassVar[str] = "everything but BN statistics"
    use: ClassVar[str] = "each node keeps statistics of its own, which are confidential"
    stays: ClassVar[str] = "statistics"
    needs: str = "statistics"


@register_strategy("mtfl")
class MTFL(PartialSharing):
    """BN's affine parameters stay on the client; its statistics are averaged with everything else.

    Mills, Hu, Min, Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge Computing, TPDS 2021,
    in the variant that the BN papers compare with (private affine parameters, federated statistics).

    A model without affine BN, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "Mills, Hu and Min, TPDS 2021"
    leaves: ClassVar[str] = "everything but BN's affine parameters"
    use: ClassVar[str] = "each node keeps a model for its own task"
    stays: ClassVar[str] = "affine"
    needs: str = "affine"


@register_strategy("standalone")
class Standalone(PartialSharing):
    """Training of every node alone, from the common initial model; nothing of the model leaves a node.

    With one node this is plain training.
    """

    paper: ClassVar[str] = ""
    leaves: ClassVar[str] = "nothing"
    use: ClassVar[str] = "the lower bound: every node alone"
    stays: ClassVar[str] = "all"
