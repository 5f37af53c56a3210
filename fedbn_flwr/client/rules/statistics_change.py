"""The change of a client's mini-batch statistics from one participation to the next."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedbn_flwr import norm, wire
from fedbn_flwr.client.rules.base import Rule, Session
from fedbn_flwr.client.rules.registry import register_rule
from fedbn_flwr.norm.batch import channel_axes


@register_rule
class StatisticsChange(Rule):
    """Report the L1 norm of the change of the mean mini-batch statistics since the last participation.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, appendix B.6, which leaves the
    quantity open: here it is the L1 norm over the means and variances of all BN layers, divided by their number, each
    averaged over the mini-batches of the round. The first participation has nothing to compare with.
    """

    #: whether the change is reported
    report_change: bool = False
    #: what its hooks see inside `torch.func.vmap` cannot be kept
    stacks: ClassVar[bool] = False

    def begin(self, session: Session) -> None:
        """Start to record."""
        self._sums: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._handles = [
            layer.register_forward_pre_hook(self._recorder(name))
            for name, layer in norm.bn_layers(session.model).items()
        ]

    def finish(self, session: Session) -> None:
        """Stop, compare, store."""
        for handle in self._handles:
            handle.remove()
        now = {name: (total / self._calls[name]).cpu() for name, total in self._sums.items()}
        before = session.memory.recall(wire.STATISTICS_CHANGE)
        if before and now:
            change = sum(float((now[name] - before[name]).abs().sum()) for name in now)
            session.metrics[wire.STATISTICS_CHANGE] = change / len(now)
        session.memory.store(wire.STATISTICS_CHANGE, now)

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach()
            statistics = torch.stack(torch.var_mean(values, dim=channel_axes(values), correction=0))
            self._sums[name] = self._sums.get(name, torch.zeros_like(statistics)) + statistics
            self._calls[name] = self._calls.get(name, 0) + 1

        return record
