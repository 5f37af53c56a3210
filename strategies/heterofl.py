"""HeteroFL's static BN."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@register_strategy("heterofl")
class HeteroFL(FedAvg):
    """FedAvg with BN that has no running statistics in training, and exact ones in evaluations.

    Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for
    Heterogeneous Clients, ICLR 2021 (its static BN, without its model slicing). As in its code,
    statistics are gathered in one exchange, every layer normalizing with its mini-batch.

    The model must be built with `norm="static-bn"`, which an experiment does by itself. A model
    without normalizers is refused.
    """

    paper: ClassVar[str] = "Diao, Ding and Tarokh, ICLR 2021"
    evaluated_with: ClassVar[tuple[str, ...]] = ("exact",)
    needs: str = "StaticBatchNorm"

    @classmethod
    def own_norm(cls, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Static BN."""
        return "static-bn", {}

    def instruct(self, instruction: Instruction) -> Instruction:
        """Training does not change statistics, so nodes need not send them."""
        return replace(super().instruct(instruction), omit="statistics")
