"""Every strategy against a slow, obvious loop, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedbn_flwr.client import training
from fedbn_flwr.strategies import MTFL, FedAvg, FedBN, FedBS, FedProx, FixBN, Scaffold, SiloBN, Standalone
from tests.helpers.harness import (
    ALONE,
    INSTRUCTION,
    Federation,
    assert_all_differ,
    distance,
    make_model,
    make_split,
)
from tests.helpers.references import EVERYTHING, State, bn_entries, federated, make_nodes

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
    "fedbs stage 1": (lambda: FedBS(epsilon=0.0), {"weigh": lambda losses, _: losses, "loss_on": "local data"}),
    "fedbs, running losses": (lambda: FedBS(epsilon=0.0, loss="running"), {"weigh": lambda losses, _: losses}),
    "fedbs both stages": (
        lambda: FedBS(epsilon=1e9, patience_rounds=1, mu=0.2),
        {
            "weigh": lambda losses, server_round: losses if server_round == 1 else [1.0] * len(losses),
            "proximal_mu": lambda server_round: 0.0 if server_round == 1 else 0.2,
            "loss_on": "local data",
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
    assert_all_differ([reference(**CASES[name][1]) for name in CASES if name != "fixbn by fraction"], by=1e-6)


DEGENERATE: dict[str, tuple[Callable[[], FedAvg], Callable[[], FedAvg]]] = {
    "fixbn that never freezes": (lambda: FixBN(freeze_round=3), FedAvg),
    "fedprox without mu": (lambda: FedProx(mu=0), FedAvg),
    "scaffold in its first round": (Scaffold, FedAvg),
    "momentum kept where there is none": (lambda: FedAvg(momentum_state="local"), FedAvg),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_case(case: str) -> None:
    special, plain = DEGENERATE[case]
    rounds = 1 if "first round" in case else 3
    one = Federation(make_model()).run(special(), rounds)
    other = Federation(make_model()).run(plain(), rounds)
    assert all(bool((one[name] == other[name]).all()) for name in other)


def test_global_momentum_with_one_client_is_one_long_run() -> None:
    got = Federation(make_model(), sizes=(20,)).run(FedAvg(momentum_state="global", **ALONE), 4, momentum=0.9)
    asked = replace(INSTRUCTION, momentum=0.9)
    expected = federated(make_model(), make_split((20,)), make_nodes((20,)), 4, asked, momentum="local")
    assert distance(got, expected) < 1e-12


@pytest.mark.parametrize("kept", ["local", "global"])
def test_momentum_is_kept_of_parameters_whatever_their_names(kept: Any) -> None:
    """A layer's name may hold the character that parts a parameter's name from the optimizer's."""
    ends = []
    for name in ("layer", "a/b/layer"):
        model = torch.nn.Sequential()
        model.add_module("flat", torch.nn.Flatten())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.add_module(name, torch.nn.Linear(16, 3))
        end = Federation(model).run(FedAvg(momentum_state=kept), momentum=0.9)
        ends.append({key.replace("a/b/", ""): value for key, value in end.items()})
    assert distance(*ends) == 0


def test_standalone_moves_nothing_and_trains_every_node_as_if_it_were_alone() -> None:
    federation, nodes = Federation(make_model()), make_nodes()
    assert distance(federation.run(Standalone()), make_model().state_dict()) == 0
    federated(make_model(), make_split(), nodes, 3, INSTRUCTION, stays=list(make_model().state_dict()))
    assert max(distance(federation.kept(node.index), node.kept) for node in nodes) < 1e-12


@pytest.mark.parametrize("strategy", [FedBN, SiloBN, MTFL, Standalone])
def test_with_one_node_what_stays_and_what_is_sent_are_one_model(strategy: type[FedAvg]) -> None:
    federation = Federation(make_model(), sizes=(20,))
    sent = federation.run(strategy(**ALONE))
    expected = federated(make_model(), make_split((20,)), make_nodes((20,)), 3, INSTRUCTION)
    assert distance({**sent, **federation.kept(0)}, expected) < 1e-12


def test_fedbs_with_equal_losses_is_uniform_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.client.training.train", _with_loss_one(training.train))
    one = Federation(make_model()).run(FedBS(epsilon=0.0, patience_rounds=100, loss="running"))
    other = Federation(make_model()).run(FedAvg(weighting="uniform"))
    assert distance(one, other) == 0


def _with_loss_one(train: Callable[..., torch.Tensor]) -> Callable[..., float]:
    def fixed(*arguments: Any, **options: Any) -> float:
        train(*arguments, **options)
        return 1.0

    return fixed
