"""What FixBN's Figure 3 shows of a client's BN layers.

`fedbn_flwr/experiments/output/recorder.py` writes it down.
"""

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedbn_flwr import norm, wire
from fedbn_flwr.client.rules import Rule, Session, register_rule
from fedbn_flwr.norm.detect import channel_axes


class BatchStatistics:
    """Records every BN layer's statistics, frozen or not, until `stop`.

    Hooks inside `torch.func.vmap` see none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._handles = [
            layer.register_forward_pre_hook(partial(self._record, name))
            for name, layer in norm.bn_layers(model).items()
        ]

    def stop(self) -> dict[str, Tensor]:
        """Remove the hooks; return by layer what `_statistics` says, averaged over the
        mini-batches, (4, C) float64.

        The squared standard errors are those of these averages.
        """
        for handle in self._handles:
            handle.remove()
        means = {}
        for name, calls in self._calls.items():
            statistics, errors = (self._sums[name] / calls).cpu().double().chunk(2)
            means[name] = torch.cat([statistics, errors / calls])
        return means

    def _record(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        row = _statistics(inputs[0].detach())
        self._sums[name] = self._sums.get(name, torch.zeros_like(row)) + row
        self._calls[name] = self._calls.get(name, 0) + 1


def _statistics(values: Tensor) -> Tensor:
    """Return a mini-batch's variance, mean, and their squared standard errors: samples are
    independent, (4, C).
    """
    variance, mean = torch.var_mean(values, dim=channel_axes(values), correction=0, keepdim=True)
    positions = tuple(range(2, values.dim()))
    squares = (values - mean).square()
    means = values
    if positions:
        squares = squares.mean(positions)
        means = means.mean(positions)
    errors = torch.stack([squares, means]).var(1, correction=1) / len(values)
    return torch.cat([torch.stack([variance.flatten(), mean.flatten()]), errors])


@register_rule
class Dynamics(Rule):
    """Report how the mini-batch statistics of every BN layer move, and how far they are from the
    global ones.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, figure 3. S_t
    are the means and variances of a layer, averaged over the mini-batches of round t (one at E = 1,
    as in the figure). G_t are the running ones that the client received:

        change    || S_t - S_j ||_1         j: the round before in which the client took part
        distance  || S_t - G_t ||_1         (a)
        variance  sum of the channels' variances of S_i over the rounds i in t - W + 1 .. t  (b)

    A number that is not there yet is NaN: a change in the first round, a variance before there are
    two rounds. The node keeps the statistics of the window.
    """

    #: W, in rounds; 0 reports nothing
    dynamics_window: int = 0
    #: what its hooks see inside `torch.func.vmap` cannot be kept
    stacks: ClassVar[bool] = False

    def begin(self, session: Session) -> None:
        """Keep the received statistics, and start to record."""
        self._received = {
            name: torch.stack([layer.running_var, layer.running_mean]).cpu().double()
            for name, layer in norm.bn_layers(session.model).items()
            if layer.running_mean is not None and layer.running_var is not None
        }
        self._statistics = BatchStatistics(session.model)

    def finish(self, session: Session) -> None:
        """Report each layer's three numbers, and keep this round's statistics."""
        kept = session.memory.recall(_MEMORY)
        seen = self._statistics.stop()
        this = torch.tensor([session.instruction.server_round])
        rounds = torch.cat([kept.get(_ROUNDS, this[:0]), this])
        within = rounds > rounds[-1] - self.dynamics_window
        windows = {}
        for name, (variance, mean, *_) in seen.items():
            now = torch.stack([variance, mean])
            window = torch.cat([kept.get(name, now[None][:0]), now[None]])
            received = self._received.get(name, torch.full_like(now, math.nan))
            if len(window) > 1:
                change = now - window[-2]
            else:
                change = torch.full_like(now, math.nan)
            windows[name] = window[within]
            variances = math.nan
            if len(windows[name]) > 1:
                variances = windows[name].var(0, correction=0).sum().item()
            session.metrics[wire.DYNAMICS + name] = [_l1(change), _l1(now - received), variances]
        session.memory.store(_MEMORY, {_ROUNDS: rounds[within], **windows})


def _l1(difference: Tensor) -> float:
    return float(difference.abs().sum())


#: where a node keeps the window, and the name of its rounds in there, which no layer has
_MEMORY = "dynamics"
_ROUNDS = "/rounds"
