"""Slow, obvious versions of FedWon, HBN and FedDNA, whose normalizers are not PyTorch's BN.

The network of `tests.helpers.harness.make_model` is written out, in the symbols of the papers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.data import Split
from fedbn_flwr.wire import Instruction
from tests.helpers.references import Node, State, mini_batches, weighted_mean

Forward = Callable[[State, Tensor], Tensor]
#: what a ReLU takes from the standard deviation (Brock et al., Characterizing Signal Propagation, 2021)
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))


def conv(w: State, name: str, h: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.conv2d(h, w[f"{name}.weight"] if weight is None else weight, w.get(f"{name}.bias"), padding=1)


def gradients(forward: Forward, w: State, x: Tensor, y: Tensor) -> State:
    leaves = {name: value.detach().requires_grad_() for name, value in w.items()}
    loss = F.cross_entropy(forward(leaves, x.double()), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def scaled_standardized(weight: Tensor) -> Tensor:
    """FedWon, equation (3): W'_ij = gamma (W_ij - mu_i) / (sigma_i sqrt(N))."""
    rows = []
    for row in weight:
        n = row.numel()
        mu = row.sum() / n
        sigma = torch.sqrt(((row - mu) ** 2).sum() / n)
        rows.append(RELU_GAIN * (row - mu) / (sigma * math.sqrt(n)))
    return torch.stack(rows)


def normalizer_free(w: State, h: Tensor) -> Tensor:
    for layer in ("net.0", "net.3"):
        h = F.relu(conv(w, layer, h, scaled_standardized(w[f"{layer}.weight"])))
    return F.linear(h.flatten(1), w["net.7.weight"], w["net.7.bias"])


def clipped(gradient: Tensor, weight: Tensor, factor: float) -> Tensor:
    """FedWon, section 3.2, after Brock et al. 2021: G_i <- lambda ||W_i|| / ||G_i|| G_i where ||G_i|| is larger."""
    if weight.dim() > 1:
        return torch.stack(
            [clipped(g.flatten(), w.flatten(), factor).reshape(g.shape) for g, w in zip(gradient, weight, strict=True)]
        )
    largest = factor * max(float(weight.norm()), 1e-3)
    return gradient * largest / gradient.norm() if float(gradient.norm()) > largest else gradient


def fedwon(w: State, split: Split, nodes: Sequence[Node], rounds: int, asked: Instruction, factor: float) -> State:
    """FedAvg of normalizer-free networks; no clipping with the factor infinity, and never of the classifier."""
    for server_round in range(1, rounds + 1):
        ends = []
        for node in nodes:
            local = dict(w)
            for x, y in mini_batches(split, node, replace(asked, server_round=server_round), False):
                for name, gradient in gradients(normalizer_free, local, x, y).items():
                    step = gradient if name.startswith("net.7") else clipped(gradient, local[name], factor)
                    local[name] = local[name] - asked.lr * step
            ends.append(local)
        w = weighted_mean(ends, [float(len(node.samples)) for node in nodes])
    return w


def hybrid(w: State, world: State, mix: State, h: Tensor, seen: dict[str, Tensor] | None = None) -> Tensor:
    """HBN in training: mean and variance are (1 - s) global + s batch, s = sigmoid(a)."""
    for number in (0, 3):
        bn = f"net.{number + 1}"
        h = conv(w, f"net.{number}", h)
        if seen is not None:
            seen[bn] = h.detach()
        mu_b = h.mean((0, 2, 3))
        var_b = ((h - mu_b[:, None, None]) ** 2).mean((0, 2, 3))
        s = 1 / (1 + torch.exp(-mix[bn]))
        mu = (1 - s) * world[f"{bn}.running_mean"] + s * mu_b
        var = (1 - s) * world[f"{bn}.running_var"] + s * var_b
        h = (h - mu[:, None, None]) / torch.sqrt(var + 1e-5)[:, None, None]
        h = F.relu(w[f"{bn}.weight"][:, None, None] * h + w[f"{bn}.bias"][:, None, None])
    return F.linear(h.flatten(1), w["net.7.weight"], w["net.7.bias"])


def hbn(
    start: State, split: Split, nodes: Sequence[Node], rounds: int, asked: Instruction, average: float
) -> tuple[State, list[State]]:
    """HBN's two exchanges a round, over all layers; returns the global state and every node's a."""
    learned = [name for name in start if name.endswith(("weight", "bias"))]
    statistics = [name for name in start if name.endswith(("running_mean", "running_var"))]
    w, world = {name: start[name] for name in learned}, {name: start[name] for name in statistics}
    mixes: list[State] = [{bn: torch.zeros(4, dtype=torch.float64) for bn in ("net.1", "net.4")} for _ in nodes]
    for server_round in range(1, rounds + 1):
        ends = []
        for place, node in enumerate(nodes):
            local = {**w, **mixes[place]}

            def forward(values: State, x: Tensor, world: State = world) -> Tensor:
                return hybrid(values, world, {bn: values[bn] for bn in ("net.1", "net.4")}, x)

            for x, y in mini_batches(split, node, replace(asked, server_round=server_round), True):
                for name, gradient in gradients(forward, local, x, y).items():
                    local[name] = local[name] - asked.lr * gradient
            mixes[place] = {bn: local.pop(bn) for bn in ("net.1", "net.4")}
            ends.append(local)
        w = weighted_mean(ends, [float(len(node.samples)) for node in nodes])
        inputs: dict[str, list[Tensor]] = {"net.1": [], "net.4": []}
        for place, node in enumerate(nodes):
            seen: dict[str, Tensor] = {}
            hybrid(w, world, mixes[place], split.inputs[torch.from_numpy(node.samples)].double(), seen)
            for bn, values in seen.items():
                inputs[bn].append(values)
        world = {**world, **pooled(inputs, world, average)}
    return {**w, **world}, mixes


def pooled(inputs: dict[str, list[Tensor]], before: State, average: float) -> State:
    """mean = sum n_k m_k / N,   var = sum n_k (v_k + (m_k - mean)^2) / (N - 1)."""
    result: State = {}
    for bn, each in inputs.items():
        n = [float(values.numel() / values.shape[1]) for values in each]
        m = [values.mean((0, 2, 3)) for values in each]
        v = [((values - mean[:, None, None]) ** 2).mean((0, 2, 3)) for values, mean in zip(each, m, strict=True)]
        mean = torch.stack([n_k * m_k for n_k, m_k in zip(n, m, strict=True)]).sum(0) / sum(n)
        spread = [n_k * (v_k + (m_k - mean) ** 2) for n_k, m_k, v_k in zip(n, m, v, strict=True)]
        for name, value in (("running_mean", mean), ("running_var", torch.stack(spread).sum(0) / (sum(n) - 1))):
            result[f"{bn}.{name}"] = average * before[f"{bn}.{name}"] + (1 - average) * value
    return result


def feddna_step(w: State, batches: Sequence[tuple[Tensor, Tensor]], p: Sequence[float], lr: float) -> State:
    """A round of one local step of FedAvg + Algorithm 2 of FedTAN's paper; returns the parameters.

    The value of each statistic is the clients' p-weighted mean, equations (39) and (40). Its derivative by a client's
    inputs is that of the client's own term, as without the exchange of gradients.
    """
    leaves = [{name: value.detach().requires_grad_() for name, value in w.items()} for _ in batches]
    each = [x.double() for x, _ in batches]
    for number in (0, 3):
        bn = f"net.{number + 1}"
        each = [conv(own, f"net.{number}", h) for own, h in zip(leaves, each, strict=True)]
        mu_i = [h.mean((0, 2, 3)) for h in each]
        mu = torch.stack([p_i * value for p_i, value in zip(p, mu_i, strict=True)]).sum(0).detach()
        var_i = [((h - mu[:, None, None]) ** 2).mean((0, 2, 3)) for h in each]
        var = torch.stack([p_i * value for p_i, value in zip(p, var_i, strict=True)]).sum(0).detach()
        outputs = []
        for own, h, own_mu, own_var in zip(leaves, each, mu_i, var_i, strict=True):
            mean, variance = mu + own_mu - own_mu.detach(), var + own_var - own_var.detach()
            h = (h - mean[:, None, None]) / torch.sqrt(variance + 1e-5)[:, None, None]
            outputs.append(F.relu(own[f"{bn}.weight"][:, None, None] * h + own[f"{bn}.bias"][:, None, None]))
        each = outputs
    ends = []
    for own, h, (_, y) in zip(leaves, each, batches, strict=True):
        loss = F.cross_entropy(F.linear(h.flatten(1), own["net.7.weight"], own["net.7.bias"]), y)
        found = torch.autograd.grad(loss, list(own.values()))
        ends.append({name: value - lr * g for (name, value), g in zip(w.items(), found, strict=True)})
    return weighted_mean(ends, p)
