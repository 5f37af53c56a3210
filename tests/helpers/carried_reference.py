"""Carried corrections from the equations: autograd does what `SharedBatchNorm` writes out, one client after another."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.data import Split
from fedbn_flwr.wire import Instruction
from tests.helpers.references import Node, mini_batches

#: added to variances that are divided by, or whose root divides
FLOOR = 1e-5


@dataclass
class Values:
    """A layer's local values: mean, variance, and the gradients by them."""

    m: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    n: int


@dataclass
class Correction:
    """What a layer adds to its local values."""

    o: Tensor
    q: Tensor
    alpha: Tensor
    beta: Tensor
    n: int


class CorrectedBatchNorm(nn.Module):
    """BN with mean m + o sqrt(v) and variance v q; a term alpha mean + beta variance of the loss adds to a and b."""

    def __init__(self, layer: nn.BatchNorm2d, correction: Correction | None) -> None:
        super().__init__()
        self.layer, self.c = layer, correction
        self.term: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        m, n = x.mean((0, 2, 3)), x.numel() // x.shape[1]
        self.m, self.v = m.detach(), (x - m.view(1, -1, 1, 1)).square().mean((0, 2, 3)).detach()
        used, variance, self.n = self.m, self.v, n
        if self.c is not None:
            used = self.m + self.c.o * (self.v + FLOOR).sqrt()
            variance = ((self.v + FLOOR) * self.c.q - FLOOR).clamp(min=0)
            self.n = self.c.n
        square = (x - used.view(1, -1, 1, 1)).square().mean((0, 2, 3))
        # the values of `used` and `variance`; they depend on x as the mean, and as the variance around `used`
        self.mean, self.variance = used + m - m.detach(), variance + square - square.detach()
        self.mean.retain_grad()
        self.variance.retain_grad()
        if self.c is not None:
            self.term = (self.c.alpha * self.mean + self.c.beta * self.variance).sum()
        with torch.no_grad():
            layer, n = self.layer, self.n
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            layer.running_mean.copy_(0.9 * layer.running_mean + 0.1 * used)
            layer.running_var.copy_(0.9 * layer.running_var + 0.1 * variance * n / (n - 1))
            layer.num_batches_tracked += 1
        shape = (1, -1, 1, 1)
        y = (x - self.mean.view(shape)) / (self.variance + layer.eps).sqrt().view(shape)
        return y * layer.weight.view(shape) + layer.bias.view(shape)

    def values(self) -> Values:
        """Return the local values, after the backward pass."""
        assert self.mean.grad is not None
        assert self.variance.grad is not None
        a, b = self.mean.grad, self.variance.grad
        if self.c is not None:
            a, b = a - self.c.alpha, b - self.c.beta
        return Values(self.m, self.v, a.clone(), b.clone(), self.x.numel() // self.x.shape[1])


@dataclass
class Server:
    """The values of nodes, the corrections made of them, and what these have added to the mean gradients so far."""

    trust: float = 3.0
    memory: float = 0.5
    oldest: int = 4
    forward_only: bool = False
    known: dict[int, dict[str, Values]] = field(default_factory=dict)
    #: the round in which a node was last heard
    last: dict[int, int] = field(default_factory=dict)
    added: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)

    def corrections(self, shares: Mapping[int, float], number: int) -> dict[int, dict[str, Correction]]:
        """Return the corrections of those participants that were heard, and not more than `oldest` rounds ago."""
        heard = {
            node: share
            for node, share in shares.items()
            if node in self.known and (not self.oldest or number - self.last[node] <= self.oldest)
        }
        total = sum(heard.values())
        found: dict[int, dict[str, Correction]] = {node: {} for node in heard}
        for layer in next(iter(self.known.values()), {}):
            each = {node: self.known[node][layer] for node in heard}
            if not each:
                continue
            p = {node: share / total for node, share in heard.items()}
            m = sum(p[node] * value.m for node, value in each.items())
            v = sum(p[node] * (value.v + (value.m - m) ** 2) for node, value in each.items())
            a = sum(p[node] * value.a for node, value in each.items())
            b = sum(p[node] * value.b for node, value in each.items())
            for node, value in each.items():
                o, q = (m - value.m) / (value.v + FLOOR).sqrt(), (v + FLOOR) / (value.v + FLOOR)
                if self.trust:
                    o, q = o.clamp(-self.trust, self.trust), q.clamp(1 / self.trust, self.trust)
                gain = 0.0 if self.forward_only else 1.0
                n = sum(other.n for other in each.values())
                of_a, of_b = self.added.get(layer, (0.0, 0.0))
                found[node][layer] = Correction(o, q, gain * (a - value.a - of_a), gain * (b - value.b - of_b), n)
        return found

    def hear(self, node: int, heard: dict[str, Values], number: int) -> None:
        """Average the statistics of a node, of which those of j rounds ago count `memory` to the power of j."""
        if node in self.known:
            kept = self.memory ** (number - self.last[node])
            for layer, new in heard.items():
                old = self.known[node][layer]
                m, v = (kept * before + (1 - kept) * now for before, now in ((old.m, new.m), (old.v, new.v)))
                heard[layer] = Values(m, v, new.a, new.b, new.n)
        self.known[node], self.last[node] = heard, number

    def settle(self, corrections: Mapping[int, dict[str, Correction]], shares: Mapping[int, float]) -> None:
        """Add what the corrections of the nodes that reply sum to; `shares` are theirs, and sum to one."""
        for node, share in shares.items():
            for layer, c in corrections.get(node, {}).items():
                of_a, of_b = self.added.get(layer, (0.0, 0.0))
                self.added[layer] = of_a + share * c.alpha, of_b + share * c.beta


def carried_run(
    model: nn.Module,
    split: Split,
    nodes: Sequence[Node],
    instruction: Instruction,
    drawn: Sequence[Sequence[int]],
    server: Server,
    silent: Callable[[int, int], bool] = lambda _node, _round: False,
) -> nn.Module:
    """Train for as many rounds as node numbers are drawn for; plain SGD, weights by examples.

    `silent` says of a node and a round, counted from 1, whether the node does not reply.
    """
    model = copy.deepcopy(model)
    for number, chosen in enumerate(drawn, start=1):
        asked = replace(instruction, server_round=number)
        total = sum(len(nodes[node].samples) for node in chosen)
        shares = {node: len(nodes[node].samples) / total for node in chosen}
        corrections = server.corrections(shares, number)
        chosen = [node for node in chosen if not silent(node, number)]
        present = sum(shares[node] for node in chosen)
        replying = {node: shares[node] / present for node in chosen}
        server.settle(corrections, replying)
        for node in shares.keys() - replying.keys():
            server.known.pop(node, None)
        ends = list[tuple[float, dict[str, Any]]]()
        for node in chosen:
            local = copy.deepcopy(model).train()
            heard = _train(local, mini_batches(split, nodes[node], asked, True), asked.lr, corrections.get(node, {}))
            server.hear(node, heard, number)
            ends.append((replying[node], local.state_dict()))
        mean = {
            name: torch.stack([share * end[name] for share, end in ends]).sum(0)
            if value.is_floating_point()
            else value.max()
            for name, value in ends[0][1].items()
        }
        model.load_state_dict(mean)
    return model


def _train(
    model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], lr: float, corrections: Mapping[str, Correction]
) -> dict[str, Values]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    replaced = {name: CorrectedBatchNorm(layer, corrections.get(name)) for name, layer in layers.items()}
    values: dict[str, Values] = {}
    for step, (inputs, targets) in enumerate(data):
        for name, layer in layers.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer if step else replaced[name])
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        (loss if step else loss + sum(each.term for each in replaced.values())).backward()
        values = values or {name: layer.values() for name, layer in replaced.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return values
