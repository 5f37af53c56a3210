"""Every strategy against a slow, obvious loop, in float64.

For FedWon, HBN and FBN, the network of `make_model` is written out, in the symbols of the papers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.data import Split
from fedbn_flwr.strategies import (
    FBN,
    HBN,
    MTFL,
    Centralized,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FedTANII,
    FedWon,
    FixBN,
    Scaffold,
    SiloBN,
    Standalone,
)
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import (
    ALONE,
    CLASSES,
    INSTRUCTION,
    SIZES,
    Federation,
    assert_all_differ,
    distance,
    make_model,
    make_split,
    parts,
)
from tests.helpers.references import (
    EVERYTHING,
    Node,
    State,
    bn_entries,
    federated,
    make_nodes,
    mini_batches,
    weighted_mean,
)

Forward = Callable[[State, Tensor], Tensor]
#: what a ReLU takes from the standard deviation (Brock et al., Characterizing Signal Propagation,
#: 2021)
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))


def conv(w: State, name: str, h: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.conv2d(
        h, w[f"{name}.weight"] if weight is None else weight, w.get(f"{name}.bias"), padding=1
    )


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
    """FedWon, section 3.2, after Brock et al. 2021: G_i <- lambda ||W_i|| / ||G_i|| G_i where
    ||G_i|| is larger.
    """
    if weight.dim() > 1:
        return torch.stack(
            [
                clipped(g.flatten(), w.flatten(), factor).reshape(g.shape)
                for g, w in zip(gradient, weight, strict=True)
            ]
        )
    largest = factor * max(float(weight.norm()), 1e-3)
    return gradient * largest / gradient.norm() if float(gradient.norm()) > largest else gradient


def fedwon(
    w: State, split: Split, nodes: Sequence[Node], rounds: int, asked: Instruction, factor: float
) -> State:
    """FedAvg of normalizer-free networks.

    No clipping with the factor infinity, and never of the classifier.
    """
    for server_round in range(1, rounds + 1):
        ends = []
        for node in nodes:
            local = dict(w)
            for x, y in mini_batches(split, node, replace(asked, server_round=server_round), False):
                for name, gradient in gradients(normalizer_free, local, x, y).items():
                    step = (
                        gradient
                        if name.startswith("net.7")
                        else clipped(gradient, local[name], factor)
                    )
                    local[name] = local[name] - asked.lr * step
            ends.append(local)
        w = weighted_mean(ends, [float(len(node.samples)) for node in nodes])
    return w


def hybrid(
    w: State, steady: State, mix: State, h: Tensor, seen: dict[str, tuple[float, Tensor, Tensor]]
) -> Tensor:
    """HBN in training: mean and variance are (1 - s) steady + s batch, s = sigmoid(a).

    N, mean, variance are seen.
    """
    for number in (0, 3):
        bn = f"net.{number + 1}"
        h = conv(w, f"net.{number}", h)
        mu_b = h.mean((0, 2, 3))
        var_b = ((h - mu_b[:, None, None]) ** 2).mean((0, 2, 3))
        s = 1 / (1 + torch.exp(-mix[bn]))
        mu = (1 - s) * steady[f"{bn}.mean"] + s * mu_b
        var = (1 - s) * steady[f"{bn}.var"] + s * var_b
        seen[bn] = float(h.numel() // h.shape[1]), mu.detach(), var.detach()
        h = (h - mu[:, None, None]) / torch.sqrt(var + 1e-5)[:, None, None]
        h = F.relu(w[f"{bn}.weight"][:, None, None] * h + w[f"{bn}.bias"][:, None, None])
    return F.linear(h.flatten(1), w["net.7.weight"], w["net.7.bias"])


def hbn(
    start: State,
    split: Split,
    nodes: Sequence[Node],
    rounds: int,
    asked: Instruction,
    average: float,
) -> tuple[State, list[State]]:
    """HBN's two exchanges a round, over all layers; returns the global state and every node's a."""
    w = {name: value for name, value in start.items() if name.endswith(("weight", "bias"))}
    steady = {
        f"{bn}.{name}": start[f"{bn}.running_{name}"]
        for bn in ("net.1", "net.4")
        for name in ("mean", "var")
    }
    gathered = steady
    mixes: list[State] = [
        {bn: torch.zeros(4, dtype=torch.float64) for bn in ("net.1", "net.4")} for _ in nodes
    ]
    for server_round in range(1, rounds + 1):
        ends = []
        for place, node in enumerate(nodes):
            local = {**w, **mixes[place]}

            def forward(values: State, x: Tensor, steady: State = steady) -> Tensor:
                return hybrid(values, steady, {bn: values[bn] for bn in ("net.1", "net.4")}, x, {})

            for x, y in mini_batches(split, node, replace(asked, server_round=server_round), True):
                for name, gradient in gradients(forward, local, x, y).items():
                    local[name] = local[name] - asked.lr * gradient
            mixes[place] = {bn: local.pop(bn) for bn in ("net.1", "net.4")}
            ends.append(local)
        w = weighted_mean(ends, [float(len(node.samples)) for node in nodes])
        steady = {
            name: average * value + (1 - average) * gathered[name] for name, value in steady.items()
        }
        each: list[dict[str, tuple[float, Tensor, Tensor]]] = []
        for place, node in enumerate(nodes):
            each.append({})
            hybrid(
                w,
                steady,
                mixes[place],
                split.inputs[torch.from_numpy(node.samples)].double(),
                each[-1],
            )
        gathered = {}
        for bn in ("net.1", "net.4"):
            total = sum(seen[bn][0] for seen in each)
            mean = torch.stack([n * m for n, m, _ in (seen[bn] for seen in each)]).sum(0) / total
            spread = torch.stack(
                [n * (v + (m - mean) ** 2) for n, m, v in (seen[bn] for seen in each)]
            ).sum(0)
            gathered |= {f"{bn}.mean": mean, f"{bn}.var": spread / (total - 1)}
    named = {
        name.replace(".mean", ".steady_mean").replace(".var", ".steady_var"): v
        for name, v in steady.items()
    }
    named |= {
        name.replace(".mean", ".running_mean").replace(".var", ".running_var"): v
        for name, v in gathered.items()
    }
    return {**w, **named}, mixes


def constant(
    w: State, mu: State, var: State, h: Tensor, seen: dict[str, tuple[Tensor, Tensor]]
) -> Tensor:
    """FBN in training: mean and variance are constants; those of the mini-batch are seen."""
    for number in (0, 3):
        bn = f"net.{number + 1}"
        h = conv(w, f"net.{number}", h)
        mu_b = h.mean((0, 2, 3))
        seen[bn] = mu_b.detach(), ((h - mu_b[:, None, None]) ** 2).mean((0, 2, 3)).detach()
        h = (h - mu[bn][:, None, None]) / torch.sqrt(var[bn] + 1e-5)[:, None, None]
        h = F.relu(w[f"{bn}.weight"][:, None, None] * h + w[f"{bn}.bias"][:, None, None])
    return F.linear(h.flatten(1), w["net.7.weight"], w["net.7.bias"])


def fbn(
    start: State,
    split: Split,
    nodes: Sequence[Node],
    rounds: int,
    asked: Instruction,
    average: float,
) -> State:
    """FBN: constants move once a round towards the pooled means, over mini-batches, of nodes'
    statistics.
    """
    w = {name: value for name, value in start.items() if name.endswith(("weight", "bias"))}
    layers, p = ("net.1", "net.4"), [len(node.samples) / sum(SIZES) for node in nodes]
    mu, var = ({bn: start[f"{bn}.running_{name}"] for bn in layers} for name in ("mean", "var"))
    for server_round in range(1, rounds + 1):
        ends, own = [], []
        for node in nodes:
            local, batches = dict(w), []
            for x, y in mini_batches(split, node, replace(asked, server_round=server_round), False):
                batches.append(dict[str, tuple[Tensor, Tensor]]())

                def forward(
                    values: State,
                    x: Tensor,
                    mu: State = mu,
                    var: State = var,
                    seen: Any = batches[-1],
                ) -> Tensor:
                    return constant(values, mu, var, x, seen)

                for name, gradient in gradients(forward, local, x, y).items():
                    local[name] = local[name] - asked.lr * gradient
            ends.append(local)
            own.append(
                {
                    bn: [torch.stack([seen[bn][k] for seen in batches]).mean(0) for k in (0, 1)]
                    for bn in layers
                }
            )
        w = weighted_mean(ends, p)
        for bn in layers:
            m = torch.stack([p_k * each[bn][0] for p_k, each in zip(p, own, strict=True)]).sum(0)
            v = torch.stack(
                [
                    p_k * (each[bn][1] + (each[bn][0] - m) ** 2)
                    for p_k, each in zip(p, own, strict=True)
                ]
            )
            mu, var = (
                {**mu, bn: average * mu[bn] + (1 - average) * m},
                {**var, bn: average * var[bn] + (1 - average) * v.sum(0)},
            )
    named = {
        f"{bn}.running_{name}": values[bn]
        for bn in layers
        for name, values in (("mean", mu), ("var", var))
    }
    return {**w, **named}


def feddna_step(
    w: State, batches: Sequence[tuple[Tensor, Tensor]], p: Sequence[float], lr: float
) -> State:
    """A round of one local step of FedAvg + Algorithm 2 of FedTAN's paper; returns the parameters.

    The value of each statistic is the clients' p-weighted mean, equations (39) and (40). Its
    derivative by a client's inputs is that of the client's own term, as without the exchange of
    gradients.
    """
    leaves = [{name: value.detach().requires_grad_() for name, value in w.items()} for _ in batches]
    each = [x.double() for x, _ in batches]
    for number in (0, 3):
        bn = f"net.{number + 1}"
        each = [conv(own, f"net.{number}", h) for own, h in zip(leaves, each, strict=True)]
        mu_i = [h.mean((0, 2, 3)) for h in each]
        mu = torch.stack([p_i * value for p_i, value in zip(p, mu_i, strict=True)]).sum(0).detach()
        var_i = [((h - mu[:, None, None]) ** 2).mean((0, 2, 3)) for h in each]
        var = (
            torch.stack([p_i * value for p_i, value in zip(p, var_i, strict=True)]).sum(0).detach()
        )
        outputs = []
        for own, h, own_mu, own_var in zip(leaves, each, mu_i, var_i, strict=True):
            mean, variance = mu + own_mu - own_mu.detach(), var + own_var - own_var.detach()
            h = (h - mean[:, None, None]) / torch.sqrt(variance + 1e-5)[:, None, None]
            outputs.append(
                F.relu(own[f"{bn}.weight"][:, None, None] * h + own[f"{bn}.bias"][:, None, None])
            )
        each = outputs
    ends = []
    for own, h, (_, y) in zip(leaves, each, batches, strict=True):
        loss = F.cross_entropy(F.linear(h.flatten(1), own["net.7.weight"], own["net.7.bias"]), y)
        found = torch.autograd.grad(loss, list(own.values()))
        ends.append(
            {name: value - lr * g for (name, value), g in zip(w.items(), found, strict=True)}
        )
    return weighted_mean(ends, p)


ROUNDS = 3


def without_normalizers() -> nn.Module:
    # the closed form: the library integrates numerically, to four digits
    return make_model("wsconv", gamma=RELU_GAIN)


def fedwon_by_hand(factor: float, **instruction: Any) -> State:
    start = {name: value.clone() for name, value in without_normalizers().state_dict().items()}
    return fedwon(
        start, make_split(), make_nodes(), ROUNDS, replace(INSTRUCTION, **instruction), factor
    )


CLIPPED: dict[str, tuple[dict[str, Any], int, float]] = {
    "with the paper's factor": ({"agc": "on"}, 4, 0.1),
    "with another factor": ({"agc": "on", "clip_factor": 0.02}, 4, 0.02),
    "from batches of 32 on": ({}, 32, 0.1),
    "not with batches of 31": ({}, 31, math.inf),
    "not where it is off": ({"agc": "off"}, 32, math.inf),
}


@pytest.mark.parametrize("case", CLIPPED)
def test_fedwon_is_the_papers_equations(case: str) -> None:
    options, batch_size, factor = CLIPPED[case]
    got = Federation(without_normalizers()).run(FedWon(**options), ROUNDS, batch_size=batch_size)
    assert distance(got, fedwon_by_hand(factor, batch_size=batch_size)) < 1e-9


def test_clipping_changes_the_example_above() -> None:
    ends = [fedwon_by_hand(factor, batch_size=32) for factor in (0.02, 0.05, 0.1, math.inf)]
    assert_all_differ(ends, by=1e-4)


@pytest.mark.parametrize("average", [0.0, 0.7])
def test_hbn_learns_its_mixes_and_pools_every_layer(average: float) -> None:
    federation = Federation(make_model("hbn"))
    start = {name: value.clone() for name, value in federation.model.state_dict().items()}
    got = federation.run(HBN(average=average), ROUNDS, lr=0.3)
    expected, mixes = hbn(
        start, make_split(), make_nodes(), ROUNDS, replace(INSTRUCTION, lr=0.3), average
    )
    assert max(float(values.abs().max()) for mix in mixes for values in mix.values()) > 1e-3
    assert distance({name: got[name] for name in expected}, expected) < 1e-9
    for index, mix in enumerate(mixes):
        found = {name.removesuffix(".mix"): value for name, value in federation.kept(index).items()}
        assert distance(found, mix) < 1e-9


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_fbn_normalizes_with_constants_that_move_once_a_round(average: float) -> None:
    start = {name: value.clone() for name, value in make_model().state_dict().items()}
    got = Federation(make_model()).run(FBN(average=average), ROUNDS)
    expected = fbn(start, make_split(), make_nodes(), ROUNDS, INSTRUCTION, average)
    assert distance({name: got[name] for name in expected}, expected) < 1e-12


def test_fbn_keeps_the_statistics_of_layers_that_do_not_learn() -> None:
    model = make_model()
    model.get_submodule("net.1").requires_grad_(False)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    got = Federation(model).run(FBN(average=0.5), ROUNDS)
    kept = ["net.1.running_mean", "net.1.running_var"]
    assert distance({name: got[name] for name in kept}, {name: start[name] for name in kept}) == 0
    assert float((got["net.4.running_mean"] - start["net.4.running_mean"]).abs().max()) > 1e-3


class FarOff(nn.Module):
    """BN of float32 numbers whose mean is a thousand of their deviations."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.head = nn.BatchNorm1d(16), nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.bn(inputs.flatten(1) + 1000))
        return logits


def test_fbns_variances_do_not_cancel() -> None:
    got = Federation(FarOff()).run(FBN(average=0.0), 1, lr=0.0)
    own = []
    for node in make_nodes():
        batches = mini_batches(make_split(), node, replace(INSTRUCTION, server_round=1), False)
        inputs = [x.double().flatten(1) for x, _ in batches]
        own.append(
            torch.stack([torch.stack([x.mean(0), x.var(0, correction=0)]) for x in inputs]).mean(0)
        )
    p, (m, v) = torch.tensor(SIZES)[:, None] / sum(SIZES), torch.stack(own).unbind(1)
    # the constant that is added changes no variance; float32 rounds the sums to 6e-5
    expected = (p * (v + (m - (p * m).sum(0)) ** 2)).sum(0)
    torch.testing.assert_close(got["bn.running_var"].double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("exchange", ["fused", "paper"])
def test_feddna_is_fedavg_with_algorithm_2(exchange: Any) -> None:
    expected = {name: value.detach() for name, value in make_model().named_parameters()}
    shares = [size / sum(SIZES) for size in SIZES]
    for server_round in range(1, ROUNDS + 1):
        asked = replace(INSTRUCTION, server_round=server_round, local_steps=1)
        batches = [mini_batches(make_split(), node, asked, True)[0] for node in make_nodes()]
        expected = feddna_step(expected, batches, shares, asked.lr)
    got = Federation(make_model()).run(FedDNA(exchange=exchange), ROUNDS, local_steps=1)
    assert distance({name: got[name] for name in expected}, expected) < 1e-12


def test_centralized_is_one_long_run_of_plain_sgd() -> None:
    got = Federation(make_model(), (44,)).run(Centralized(**ALONE), ROUNDS)
    model, (node,) = make_model(), make_nodes((44,))
    optimizer = torch.optim.SGD(model.parameters(), lr=INSTRUCTION.lr)
    model.train()
    for server_round in range(1, ROUNDS + 1):
        for inputs, labels in mini_batches(
            make_split((44,)), node, replace(INSTRUCTION, server_round=server_round), True
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    assert (
        distance(got, {name: value.detach() for name, value in model.state_dict().items()}) < 1e-12
    )


def test_without_bn_a_step_of_all_clients_on_all_data_is_one_of_centralized_training() -> None:
    """The clients' gradients, weighted by examples, are the gradient of their union."""
    whole: dict[str, Any] = {"local_steps": 1, "batch_size": 100}
    federated = Federation(make_model("gn")).run(FedAvg(), ROUNDS, **whole)
    union = Federation(make_model("gn"))
    union.parts = [parts((44,))[0]] * len(SIZES)
    pooled = union.run(Centralized(fraction_train=0.25, **ALONE), ROUNDS, **whole)
    assert distance(federated, pooled) < 1e-12


STATISTICS = EVERYTHING[2:]


def reference(rounds: int = 3, instruction: dict[str, Any] | None = None, **rules: Any) -> State:
    asked = replace(INSTRUCTION, **(instruction or {}))
    return federated(make_model(), make_split(), make_nodes(), rounds, asked, **rules)


def uniform(losses: list[float], _: int) -> list[float]:
    return [1.0] * len(losses)


def stays(*kinds: str) -> Sequence[str]:
    return bn_entries(make_model(), kinds)


CASES: dict[str, tuple[Callable[[], FedAvg], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedavg uniform": (lambda: FedAvg(weighting="uniform"), {"weigh": uniform}),
    "fedprox": (lambda: FedProx(mu=0.3), {"proximal_mu": lambda _: 0.3}),
    "fixbn": (lambda: FixBN(freeze_round=1), {"frozen_after": 1}),
    "fixbn at the paper's rate": (
        lambda: FixBN(freeze_round=1, frozen_lr=1.0),
        {"frozen_after": 1, "frozen_lr": 1.0},
    ),
    "fixbn by fraction": (lambda: FixBN(freeze_round=0.67), {"frozen_after": 2}),
    "fedbn": (FedBN, {"stays": stays(*EVERYTHING)}),
    "silobn": (SiloBN, {"stays": stays(*STATISTICS)}),
    "mtfl": (MTFL, {"stays": stays("weight", "bias")}),
    "fedbs stage 1": (
        lambda: FedBS(epsilon=0.0),
        {"weigh": lambda losses, _: losses, "loss_on": "after"},
    ),
    "fedbs, received losses": (
        lambda: FedBS(epsilon=0.0, loss="received"),
        {"weigh": lambda losses, _: losses, "loss_on": "before"},
    ),
    "fedbs, running losses": (
        lambda: FedBS(epsilon=0.0, loss="running"),
        {"weigh": lambda losses, _: losses},
    ),
    "fedbs both stages": (
        lambda: FedBS(epsilon=1e9, patience_rounds=1, mu=0.2),
        {
            "weigh": lambda losses, server_round: (
                losses if server_round == 1 else [1.0] * len(losses)
            ),
            "proximal_mu": lambda server_round: 0.0 if server_round == 1 else 0.2,
            "loss_on": "after",
        },
    ),
    "momentum discarded": (FedAvg, {"instruction": {"momentum": 0.9}}),
    "momentum local": (
        lambda: FedAvg(momentum_state="local"),
        {"instruction": {"momentum": 0.9}, "momentum": "local"},
    ),
    "momentum global, but of what stays local": (
        lambda: FedBN(momentum_state="global"),
        {"instruction": {"momentum": 0.9}, "momentum": "global", "stays": stays(*EVERYTHING)},
    ),
    "momentum global": (
        lambda: FedAvg(momentum_state="global"),
        {"instruction": {"momentum": 0.9}, "momentum": "global"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_its_reference(case: str) -> None:
    make, rules = CASES[case]
    got = Federation(make_model()).run(make(), **rules.get("instruction", {}))
    assert distance(got, reference(**rules)) < 1e-12


def test_references_tell_the_methods_apart() -> None:
    assert_all_differ(
        [reference(**CASES[name][1]) for name in CASES if name != "fixbn by fraction"], by=1e-6
    )


DEGENERATE: dict[str, tuple[Callable[[], FedAvg], Callable[[], FedAvg]]] = {
    "fixbn that never freezes": (lambda: FixBN(freeze_round=3), FedAvg),
    "fedprox without mu": (lambda: FedProx(mu=0), FedAvg),
    "scaffold in its first round": (Scaffold, FedAvg),
    "momentum kept where there is none": (lambda: FedAvg(momentum_state="local"), FedAvg),
    "fedtan-ii that never freezes": (lambda: FedTANII(m=3), FedTAN),
    "fedtan-ii frozen from the start": (lambda: FedTANII(m=0), lambda: FixBN(freeze_round=0)),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_case(case: str) -> None:
    special, plain = DEGENERATE[case]
    rounds = 1 if "first round" in case else 3
    one = Federation(make_model()).run(special(), rounds)
    other = Federation(make_model()).run(plain(), rounds)
    assert all(bool((one[name] == other[name]).all()) for name in other)


def test_standalone_moves_nothing_and_trains_every_node_as_if_it_were_alone() -> None:
    federation, nodes = Federation(make_model()), make_nodes()
    assert distance(federation.run(Standalone()), make_model().state_dict()) == 0
    federated(
        make_model(), make_split(), nodes, 3, INSTRUCTION, stays=list(make_model().state_dict())
    )
    assert max(distance(federation.kept(node.index), node.kept) for node in nodes) < 1e-12
