"""Base of the layer-wise strategies that can do with corrections from earlier rounds; no method by itself."""

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.carried import ROUND, CarriedValues, Entries, Examples
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.averaging import Arrays, record, unpack
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.wire import Instruction, masked

from .base_layerwise import Layerwise


class CarriedCorrections(Layerwise):
    """`Layerwise`, or with `carry=True` one exchange a round: first steps use corrections from earlier rounds.

    The server keeps each node's local values of every BN layer. From those of a round's participants it makes the
    corrections that go with their models in that round's ordinary training message, and their replies bring new values.
    Statistics are averaged over rounds: after j rounds, what was kept counts `memory` to the power of j.
    `fedbn_flwr.layerwise.carried` derives it. A node that was never heard, was not heard for more than `oldest` rounds,
    or did not reply when last drawn, goes without corrections, and is not in the pool. What corrections of gradients
    add because a drawn node is silent, those of the next round take back. Messages carry 4 numbers a BN channel more,
    each way (2 without gradients), and each layer's name and 3 sizes. Nodes remember nothing. With `secure`, nodes keep
    their values and make their corrections, of a pool for which the server asks at the start of a round
    (`fedbn_flwr.client.masked_carried`).

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
            float | None,
            "share of a node's earlier statistics in what carry=true keeps, after one round; 0 keeps the last only. By "
            "default 0.5, and 0 with secure=true",
        ] = None,
        oldest: Annotated[
            int, "rounds after which a node's values are too old for corrections with carry=true; 0 is no limit"
        ] = 4,
        carry_limit: Annotated[float, "megabytes of nodes' values that the server keeps for carry=true"] = 256.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if trust != 0 and trust <= 1:
            raise ValueError(f"trust must be 0 or more than 1, got {trust}")
        if memory is None:
            memory = 0.0 if self.secure else 0.5
        if not 0 <= memory < 1:
            raise ValueError(f"memory must be at least 0 and less than 1, got {memory}")
        if oldest < 0:
            raise ValueError(f"oldest must be 0 or more, got {oldest}")
        if carry_limit <= 0:
            raise ValueError(f"carry_limit must be positive, got {carry_limit}")
        self.carry = carry
        self.carried = CarriedValues(trust, carry_limit, memory, oldest, self.combiner)
        self._corrections: Mapping[int, Entries] = {}

    def why_single(self) -> str:
        """Corrections are made of each node's values; under masks, each node makes its own."""
        why = ""
        if self.carry and not self.secure:
            why = "carry=true keeps each node's values"
        elif self.carry and self.carried.memory:
            why = "with memory, the sums of two rounds have values in common, and their difference may show a node's"
        return super().why_single() or why

    def exchanges(self, instruction: Instruction) -> bool:
        """Return whether clients wait for each other in this round."""
        return super().exchanges(instruction) and instruction.layerwise not in wire.CARRIED_MODES

    def package(self, node: int, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """Add the node's corrections, if there are some."""
        groups = super().package(node, arrays)
        if node in self._corrections:
            groups[wire.CARRIED] = record(self._corrections[node])
        return groups

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Keep the nodes' values, and average the models."""
        merged = super().merge(replies, weights)
        if self.secure:
            # the nodes keep the values themselves
            heard = [node for reply in replies for node in reply.nodes if self._carries]
            self.carried.by_node |= {node: {ROUND: np.array(self.round.number)} for node in heard}
            return merged
        averaged = {reply.node: weight for reply, weight in zip(replies, weights, strict=True)}
        self.carried.settle(self._corrections, set(self.round.nodes) - averaged.keys(), averaged)
        for reply in replies:
            values = reply.records.get(wire.CARRIED)
            if not self.carry or values is None:
                continue
            if reason := self.carried.hear(reply.node, reply.num_examples, values, self.round.number):
                log(WARNING, "Node %d goes without carried corrections: %s", reply.node, reason)
        return merged

    def _make_messages(
        self, nodes: Sequence[int], arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        # evaluations are instructed without it
        self._corrections = self._correct(nodes) if self._carries else {}
        return super()._make_messages(nodes, arrays, config, kind)

    @property
    def _carries(self) -> bool:
        """Whether the round's instruction asks for corrections that are carried."""
        return self.instruction.layerwise in wire.CARRIED_MODES

    def _correct(self, nodes: Sequence[int]) -> Mapping[int, Entries]:
        """Sums run in the order of partitions, because the nodes' ids are random."""
        ordered = sorted(nodes, key=lambda node: (self.partitions.get(node, -1), node))
        if self.secure:
            return self._pool(ordered)
        return self.carried.corrections(ordered, self._weigh_examples, self.server_round)

    def _pool(self, nodes: Sequence[int]) -> Mapping[int, Entries]:
        """Ask the nodes that have new values for their pool, and return it for each node that is in it.

        A node gives its values once: after this, the server counts on it when it has replied again.
        """
        asked = self.carried.recent(nodes, self.server_round)
        for node in asked:
            del self.carried.by_node[node]
        if len(asked) < self.secure_min:
            return {}
        config = ConfigRecord({**self.round.other_config, **self.instruction.to_config()})
        messages = [Message(RecordDict({wire.CONFIG: config}), node, masked.CARRIED_QUERY) for node in asked]
        for reply in ask_nodes(self.grid, messages, self.exchange_timeout).values():
            if reply.has_content() and isinstance(reply.content, masked.Summed):
                pool = unpack(reply.content.array_records[wire.CARRIED])
                counts = [pool.pop(name) for name in list(pool) if name.startswith(masked.COUNT)]
                pool |= {masked.COUNTS: np.stack(counts), masked.TRUST: np.array(self.carried.trust)}
                return dict.fromkeys(reply.content.nodes, pool)
            if reply.has_error():
                log(WARNING, "A node gave no values: %s", reply.error.reason)
        log(WARNING, "Round %d goes without carried corrections: too few nodes gave their values", self.server_round)
        return {}

    def _weigh_examples(self, examples: Examples) -> list[float]:
        """Return the weights that the nodes' models will have; none if these are fewer nodes than can be pooled."""
        if len(examples) < self.fewest_nodes:
            return []
        return self.weigh([NodeReply(node, 0, count, {}, {}, RecordDict()) for node, count in examples.items()])
