"""SCAFFOLD."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord

from fedbn_flwr import wire
from fedbn_flwr.server.averaging import Arrays, average, normalize, record
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@register_strategy("scaffold")
class Scaffold(FedAvg):
    """FedAvg with control variates that correct the drift of local gradients.

    Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.

        local:   y <- y - lr (g(y) - c_i + c)
        server:  c <- c + |S| / N * sum_{i in S} p_i (c_i+ - c_i)

    for parameters only, never buffers: BN statistics have no gradient. Nodes keep their c_i; one that comes late
    starts from the server's c. The weights p_i are those of the averaging (the paper's are 1 / |S|:
    `weighting="uniform"`). While all variates are zero, as in the first round, this is FedAvg. The variates double
    the messages.
    """

    required: ClassVar[tuple[str, ...]] = (wire.CONTROL_VARIATES,)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._variate: Arrays = {}

    def instruct(self, instruction: Instruction) -> Instruction:
        """Correct gradients."""
        return super().instruct(instruction).with_rule(control_variates=True)

    def package(self, node: int, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """Add the server's variate, once there is one."""
        groups = super().package(node, arrays)
        if self._variate:
            groups[wire.CONTROL_VARIATES] = record(self._variate)
        return groups

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Average the models, and move the server's variate by the nodes' changes."""
        assert self.grid is not None
        share = len(replies) / max(len(list(self.grid.get_node_ids())), len(replies))
        changes = average([reply.records[wire.CONTROL_VARIATES] for reply in replies], normalize(weights))
        for name, change in changes.items():
            before = self._variate.get(name, np.zeros_like(change))
            moved = before.astype(np.float64) + share * change.astype(np.float64)
            self._variate[name] = moved.astype(change.dtype)
        return super().merge(replies, weights)
