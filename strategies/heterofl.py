"""HeteroFL's static BN."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedbn_flwr.server.pooling import Pooled
from fedbn_flwr.state import Arrays
from fedbn_flwr.wire import Instruction

from .base_gathering import Gathering
from .registry import register_strategy


@register_strategy("heterofl")
class HeteroFL(Gathering):
    """BN without running statistics in training; those of the evaluation are gathered from all clients.

    Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
    Clients, ICLR 2021 (its static BN, without its model slicing). As in its code, statistics are gathered in one
    exchange, every layer normalizing with its mini-batch.

    The model must be built with `norm="static-bn"`, which an experiment does by itself. A model without normalizers
    is refused. Gathering happens in the rounds that are evaluated.
    """

    paper: ClassVar[str] = "Diao, Ding and Tarokh, ICLR 2021"
    leaves: ClassVar[str] = "parameters; statistics when the model is evaluated"
    use: ClassVar[str] = "a model that should train without running statistics"
    needs: str = "StaticBatchNorm"

    @classmethod
    def own_norm(cls, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Static BN."""
        return "static-bn", {}

    def instruct(self, instruction: Instruction) -> Instruction:
        """Training does not change statistics, so nodes need not send them."""
        return replace(super().instruct(instruction), omit="statistics")

    def update(self, pooled: Pooled) -> Arrays:
        """Update, and gather if this round is evaluated."""
        merged = super().update(pooled)
        if not self.evaluates(self.round.number):
            return merged
        nodes = sorted(self.round.grid.get_node_ids())
        return self.installed(merged, self.gather(merged, nodes, self.round.instruction))
