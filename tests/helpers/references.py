"""Slow, obvious versions of the strategies: plain loops over clients, no messages, no classes of
the library.

Only the choice of mini-batches and of nodes is taken from the library, because it is what both
sides must share.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.client import batch_plan as batches
from fedbn_flwr.data import Split
from fedbn_flwr.randomness import torch_generator
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import SIZES, parts

State = dict[str, Tensor]
BN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: the kinds of a BN layer's entries
EVERYTHING = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@dataclass
class Node:
    """One client: its samples, and what it keeps."""

    index: int
    samples: np.ndarray
    kept: State = field(default_factory=dict)
    momentum: State = field(default_factory=dict)


def make_nodes(sizes: Sequence[int] = SIZES) -> list[Node]:
    """Return the clients of the harness's federation."""
    return [Node(index, samples) for index, samples in enumerate(parts(sizes))]


def copy_state(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def mini_batches(
    split: Split, node: Node, asked: Instruction, learning_bn: bool
) -> list[tuple[Tensor, Tensor]]:
    generator = torch_generator(
        asked.seed, "batches", "round", asked.server_round, "partition", node.index
    )
    sizes = batches.batch_sizes(len(node.samples), asked, learning_bn)
    drawn = batches.draw_batches(len(node.samples), sizes, asked.replacement, generator).split(
        sizes
    )
    chosen = [torch.from_numpy(node.samples)[positions] for positions in drawn]
    return [(split.inputs[index], split.labels[index]) for index in chosen]


def local_sgd(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    asked: Instruction,
    correct: Callable[[str, nn.Parameter], Tensor | float] = lambda name, parameter: 0.0,
    velocity: State | None = None,
    frozen: bool = False,
) -> float:
    """SGD written out: v <- momentum v + gradient + correction, w <- w - lr v.

    Returns the mean loss a sample.
    """
    velocity = {} if velocity is None else velocity
    total = samples = 0.0
    model.train()
    if frozen:
        for layer in model.modules():
            if isinstance(layer, BN):
                layer.eval()
    for inputs, labels in data:
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(
                model.named_parameters(), gradients, strict=True
            ):
                step = gradient + correct(name, parameter)
                velocity[name] = asked.momentum * velocity.get(name, torch.zeros_like(step)) + step
                parameter.sub_(asked.lr * velocity[name])
        total, samples = total + float(loss.detach()) * len(labels), samples + len(labels)
    return total / samples


@torch.no_grad()
def empirical_risk(model: nn.Module, split: Split, node: Node) -> float:
    """F_k(w) = (1 / n_k) sum_j f_j(w; x_j, y_j), one sample after another (Idrissi et al., FedBS,
    section I).
    """
    model.eval()
    samples = [(split.inputs[j : j + 1], split.labels[j : j + 1]) for j in node.samples.tolist()]
    return sum(float(F.cross_entropy(model(x), y)) for x, y in samples) / len(samples)


def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    total = sum(weights)
    result = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            parts = [
                state[name] * (weight / total)
                for state, weight in zip(states, weights, strict=True)
            ]
            result[name] = torch.stack(parts).sum(0)
        else:
            result[name] = torch.stack([state[name] for state in states]).amax(0)
    return result


def federated(
    model: nn.Module,
    split: Split,
    nodes: Sequence[Node],
    rounds: int,
    asked: Instruction,
    *,
    stays: Sequence[str] = (),
    weigh: Callable[[list[float], int], list[float]] | None = None,
    proximal_mu: Callable[[int], float] = lambda server_round: 0.0,
    frozen_after: int = 10**9,
    frozen_lr: float = 0.05,
    momentum: str = "none",
    loss_on: str = "mini-batches",
) -> State:
    """Every rule of this kind in one loop; `stays` are the entries that each node keeps."""
    world = copy_state(model)
    shared_velocity: State = {}
    for server_round in range(1, rounds + 1):
        frozen = server_round > frozen_after
        now = replace(
            asked, server_round=server_round, lr=asked.lr * (frozen_lr if frozen else 1.0)
        )
        ends, losses, velocities = [], [], []
        for node in nodes:
            local = copy.deepcopy(model)
            local.load_state_dict({**world, **node.kept})
            start = {name: value.detach().clone() for name, value in local.named_parameters()}
            own = {
                name: value
                for name, value in node.momentum.items()
                if name in stays or momentum == "local"
            }
            velocity = {} if momentum == "none" else {**shared_velocity, **own}
            mu = proximal_mu(server_round)

            def correct(
                name: str, parameter: nn.Parameter, mu: float = mu, start: State = start
            ) -> Tensor:
                return mu * (parameter.detach() - start[name])

            risk = {"before": empirical_risk(local, split, node)}
            data = mini_batches(split, node, now, not frozen)
            risk["mini-batches"] = local_sgd(local, data, now, correct, velocity, frozen)
            risk["after"] = empirical_risk(local, split, node)
            losses.append(risk[loss_on])
            end = copy_state(local)
            node.kept = {name: end[name] for name in stays}
            node.momentum = velocity
            velocities.append(velocity)
            ends.append({name: value for name, value in end.items() if name not in stays})
        weights = [float(len(node.samples)) for node in nodes]
        if weigh is not None:
            weights = weigh(losses, server_round)
        world = {**world, **weighted_mean(ends, weights)}
        if momentum == "global":
            shared_velocity = weighted_mean(velocities, weights)
    return world


def scaffold(
    model: nn.Module,
    split: Split,
    nodes: Sequence[Node],
    drawn: Sequence[Sequence[int]],
    asked: Instruction,
    p: Sequence[float],
) -> State:
    """SCAFFOLD (Karimireddy et al., ICML 2020), algorithm 1, option II, in its notation; eta_g = 1.

    `drawn` is S of every round, `p` the clients' shares of the objective, 1 / N in the paper.
    Buffers, which the paper has not, are averaged. With momentum, (x - y) / (K eta) is no gradient;
    the gradients' mean is taken.
    """
    x, eta, beta = copy_state(model), asked.lr, asked.momentum
    parameters = [name for name, _ in model.named_parameters()]
    c = {name: torch.zeros_like(x[name]) for name in parameters}
    c_i = [dict(c) for _ in nodes]
    for number, s_t in enumerate(drawn, 1):
        y, delta_c = {}, {}
        for i in s_t:
            local = copy.deepcopy(model)
            local.load_state_dict(x)
            local.train()
            v = {name: torch.zeros_like(x[name]) for name in parameters}
            g_mean = {name: torch.zeros_like(x[name]) for name in parameters}
            data = mini_batches(split, nodes[i], replace(asked, server_round=number), True)
            for inputs, labels in data:
                loss = F.cross_entropy(local(inputs), labels)
                g = dict(
                    zip(
                        parameters, torch.autograd.grad(loss, list(local.parameters())), strict=True
                    )
                )
                with torch.no_grad():
                    for name, y_i in local.named_parameters():
                        v[name] = beta * v[name] + (g[name] - c_i[i][name] + c[name])
                        y_i.sub_(eta * v[name])
                        g_mean[name] += g[name] / len(data)
            y[i] = copy_state(local)
            option_ii = {
                name: c_i[i][name] - c[name] + (x[name] - y[i][name]) / (len(data) * eta)
                for name in parameters
            }
            c_plus = g_mean if beta else option_ii
            delta_c[i] = {name: c_plus[name] - c_i[i][name] for name in parameters}
            c_i[i] = c_plus
        x = weighted_mean([y[i] for i in s_t], [p[i] for i in s_t])
        c = {
            name: torch.stack([c[name], *(p[i] * delta_c[i][name] for i in s_t)]).sum(0)
            for name in parameters
        }
    return x


def bn_entries(model: nn.Module, kinds: Sequence[str]) -> list[str]:
    """State-dict names of BN's entries of these kinds."""
    return [
        f"{name}.{kind}"
        for name, layer in model.named_modules()
        if isinstance(layer, BN)
        for kind in kinds
    ]


def pooled_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of a layer's inputs, channel by channel."""
    flat = values.transpose(0, 1).reshape(values.shape[1], -1)
    return flat.mean(1), flat.var(1, unbiased=True)
