"""Strategies in which a part of the model never leaves the client: BN, its statistics, its affine
part, or all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.server.method_state import BY_NODE, MethodState
from fedbn_flwr.server.pooling import Pooled, Sent
from fedbn_flwr.server.replies import NodeReply, lacks_state
from fedbn_flwr.state import Arrays, arrays_to_record
from fedbn_flwr.state.records import make_record
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@dataclass
class PartialSharingState(MethodState):
    """What the server knows of the nodes' memories."""

    #: the nodes that have the entries that stay
    served: dict[int, bool] = field(default_factory=dict, metadata=BY_NODE)
    #: the weights of the last round's participants
    participants: dict[int, float] = field(default_factory=dict, metadata=BY_NODE)


class PartialSharing(FedAvg):
    """FedAvg over the shared entries.

    Each node keeps the entries of the group `stays` in its own `Context.state`.

    Which entries belong to the group is known by the client, which has the model. The server learns
    it from the replies: a node gets the whole state until it has answered once, and from then on
    only what it shares. A node that comes late, or lost its memory, so starts from the server's
    values of the entries that stay: the initial ones, or with `mean_personal=True` the mean of what
    the last round's participants hold, under the weights of their models. The latter makes nodes
    send these entries when they evaluate (never in training). FedBS tests FedBN so, on a node
    without data: with "the average of the mean and the variance learned in the previous round". A
    node that did not take part has learned nothing in it, and one that never did holds initial
    statistics.
    """

    personal: ClassVar[bool] = True
    evaluated_with: ClassVar[tuple[str, ...]] = ("running", "own")
    state_type: ClassVar[type[MethodState]] = PartialSharingState
    state: PartialSharingState

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
        # which needs each participant's own weight
        self.reads_replies = self.reads_replies or mean_personal
        if mean_personal:
            self.let_send(Sent("the entries that nodes keep, for mean_personal"))

    def instruct_evaluation(self, instruction: Instruction) -> Instruction:
        """Let nodes send what they keep, if its mean is wanted."""
        return replace(super().instruct_evaluation(instruction), send_personal=self.mean_personal)

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """The whole state for a node that has none of its own, the shared entries for the
        others.
        """
        packages = super().package(nodes, arrays)
        for node in [node for node in nodes if node in self.state.served]:
            whole = packages[node][self.arrayrecord_key]
            shared = {name: array for name, array in whole.items() if name in self.state.shared}
            packages[node][self.arrayrecord_key] = make_record(shared)
        return packages

    def ask(self, grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
        """Let nodes that have lost their entries train from the server's, in this round.

        Return all replies.
        """
        replies = list(super().ask(grid, messages, timeout))
        nodes = sorted({reply.metadata.src_node_id for reply in replies if lacks_state(reply)})
        if not nodes:
            return replies
        log(
            WARNING,
            "Nodes %s have lost the entries that stay on them: they get the whole model",
            nodes,
        )
        for node in nodes:
            self.state.served.pop(node, None)
        packages = self.package(nodes, arrays_to_record(self.round.current))
        sent = list[Message]()
        again = list[Message]()
        for message in self.round.messages:
            node = message.metadata.dst_node_id
            if node in packages:
                # the rest stays as it was: it may depend on all nodes of the round
                message.content[self.arrayrecord_key] = packages[node][self.arrayrecord_key]
                again.append(Message(message.content, node, message.metadata.message_type))
            else:
                sent.append(message)
        self.round.messages = sent + again
        usable = [reply for reply in replies if not lacks_state(reply)]
        return [*usable, *ask_nodes(grid, again, self.exchange_timeout).values()]

    def update(self, pooled: Pooled) -> Arrays:
        """Average what is shared; the server's values of the rest are the participants' mean, where
        it is known.
        """
        self.lose_round()
        self.state.participants = dict(pooled.weights)
        self.state.served |= dict.fromkeys(pooled.weights, True)
        updated = super().update(pooled)
        return {
            **updated,
            **{
                name: self.state.personal[name]
                for name in self.state.personal.keys() - pooled.model
            },
        }

    def lose_round(self) -> None:
        """Send nodes that failed the whole state next time: they may have lost their memory."""
        for node in self.round.nodes:
            self.state.served.pop(node, None)

    def learn_from_evaluation(self, replies: Sequence[NodeReply]) -> None:
        """Average what the last round's participants hold, if they have sent it."""
        weights = self.state.participants
        learned = [
            reply for reply in replies if reply.records.get(wire.STAYS) and reply.node in weights
        ]
        if learned and not self.averager.refuse_few(
            len(learned), self.round.number, "kept entries"
        ):
            states = [reply.records[wire.STAYS] for reply in learned]
            self.state.personal |= self.averager.average(
                states, [weights[reply.node] for reply in learned]
            )


@register_strategy("fedbn")
class FedBN(PartialSharing):
    """BN layers stay on the client, affine parameters and statistics; everything else is averaged.

    X. Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR
    2021.

    A model without BN, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "X. Li et al., ICLR 2021, arXiv:2102.07623"
    stays: ClassVar[str] = "bn"
    needs: str = "bn"


@register_strategy("silobn")
class SiloBN(PartialSharing):
    """BN statistics stay on the client; affine parameters are averaged with everything else.

    Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART 2020.

    A model without BN statistics, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "Andreux et al., DART 2020"
    stays: ClassVar[str] = "statistics"
    needs: str = "statistics"


@register_strategy("mtfl")
class MTFL(PartialSharing):
    """BN's affine parameters stay on the client; its statistics are averaged with everything else.

    Mills, Hu, Min, Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge
    Computing, TPDS 2021, in the variant that the BN papers compare with (private affine parameters,
    federated statistics).

    A model without affine BN, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "Mills, Hu and Min, TPDS 2021"
    stays: ClassVar[str] = "affine"
    evaluated_with: ClassVar[tuple[str, ...]] = ("running", "exact", "own")
    needs: str = "affine"


@register_strategy("standalone")
class Standalone(PartialSharing):
    """Training of every node alone, from the common initial model.

    Nothing of the model leaves a node.

    With one node this is plain training.
    """

    paper: ClassVar[str] = ""
    replaced: ClassVar[tuple[str, ...]] = ("server_optimizer", "server_lr")
    stays: ClassVar[str] = "all"
