"""Base of the layer-wise strategies that can do with corrections from earlier rounds; no method by itself."""

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.carried import CarriedValues, Entries, Examples
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.averaging import Arrays, record
from fedbn_flwr.server.replies import NodeReply, Pooled
from fedbn_flwr.wire import Instruction

from .base_layerwise import Layerwise


class CarriedCorrections(Layerwise):
    """`Layerwise`, or with `carry=True` one exchange a round: first steps use corrections from earlier rounds.

    The server keeps each node's local values of every BN layer. From those of a round's participants it makes the
    corrections that go with their models in that round's ordinary training message, and their replies bring new values.
    Statistics are averaged over rounds: after j rounds, what was kept counts `memory` to the power of j.
    `fedbn_flwr.layerwise.carried` derives it. A node that was never heard, was not heard for more than `oldest` rounds,
    or did not reply when last drawn, goes without corrections, and is not in the pool. What corrections of gradients
    add because a drawn node is silent, those of the next round take back. Messages carry 4 numbers a BN channel more,
    each way (2 without gradients), and each layer's name and 3 sizes. Nodes remember nothing.

    Corrections of statistics are cut to `trust` standard deviations, and to variance ratios between 1 / `trust` and
    `trust`; 0 leaves them as they are. What the server keeps has at most `carry_limit` megabytes. With one client this
    is FedAvg.
    """

    kept: ClassVar[tuple[str, ...]] = ("carried",)
    kept_by_node: ClassVar[tuple[str, ...]] = ("carried.by_node",)
    #: the mode of the first step under carried corrections: one of `fedbn_flwr.wire.CARRIED_MODES`
    carried_mode: ClassVar[str] = "carried"

    def __init__(
        self,
        *,
        carry: Annotated[
            bool, "use corrections from earlier rounds in place of exchanges: one exchange a round"
        ] = False,
        trust: Annotated[
            float, "bound of carried corrections, in standard deviations and as ratio of variances; 0 is none"
        ] = 3.0,
        memory: Annotated[
            float,
            "share of a node's earlier statistics in what carry=true keeps, after one round; 0 keeps the last only",
            Range(0, 1, "high"),
        ] = 0.5,
        oldest: Annotated[
            int,
            "rounds after which a node's values are too old for corrections with carry=true; 0 is no limit",
            Range(0),
        ] = 4,
        carry_limit: Annotated[
            float, "megabytes of nodes' values that the server keeps for carry=true", Range(0, excluded="low")
        ] = 256.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if trust != 0 and trust <= 1:
            raise ValueError(f"trust must be 0 or more than 1, got {trust}")
        self.carry = carry
        if carry:
            self.why_single = self.why_single or "carry=true keeps each node's values"
        self.carried = CarriedValues(trust, carry_limit, memory, oldest, self.combiner)
        self._corrections: Mapping[int, Entries] = {}

    def exchanges(self, instruction: Instruction) -> bool:
        """Return whether clients wait for each other in this round."""
        return super().exchanges(instruction) and instruction.layerwise not in wire.CARRIED_MODES

    def package(self, node: int, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """Add the node's corrections, if there are some."""
        groups = super().package(node, arrays)
        if node in self._corrections:
            groups[wire.CARRIED] = record(self._corrections[node])
        return groups

    def update(self, pooled: Pooled) -> Arrays:
        """Keep the nodes' values, and update the model."""
        silent = set(self.round.nodes) - pooled.weights.keys()
        self.carried.settle(self._corrections, silent, dict(pooled.weights))
        for reply in self.train_replies:
            values = reply.records.get(wire.CARRIED)
            if not self.carry or values is None:
                continue
            if reason := self.carried.hear(reply.node, reply.num_examples, values, self.round.number):
                log(WARNING, "Node %d goes without carried corrections: %s", reply.node, reason)
        return super().update(pooled)

    def _make_messages(
        self, nodes: Sequence[int], arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        # evaluations are instructed without it
        carries = self.instruction.layerwise in wire.CARRIED_MODES
        self._corrections = self._correct(nodes) if carries else {}
        return super()._make_messages(nodes, arrays, config, kind)

    def _correct(self, nodes: Sequence[int]) -> Mapping[int, Entries]:
        """Sums run in the order of partitions, because the nodes' ids are random."""
        ordered = sorted(nodes, key=lambda node: (self.partitions.get(node, -1), node))
        return self.carried.corrections(ordered, self._weigh_examples, self.server_round)

    def _weigh_examples(self, examples: Examples) -> list[float]:
        """Return the weights that the nodes' models will have; none if these are fewer nodes than can be pooled."""
        if len(examples) < self.fewest_nodes:
            return []
        return self.weigh([NodeReply(node, 0, count, {}, {}, RecordDict()) for node, count in examples.items()])
