"""Every strategy against a slow, obvious loop, in float64."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedbn_flwr import state
from fedbn_flwr.client import training
from fedbn_flwr.simulation.sequential import InProcessGrid
from fedbn_flwr.strategies import MTFL, FedAvg, FedBN, FedBS, FedProx, FixBN, Scaffold, SiloBN, Standalone
from tests.helpers.harness import INSTRUCTION, SIZES, Backwards, Federation, distance, make_model, make_split, parts
from tests.helpers.references import Node, State, bn_entries, federated

EVERYTHING = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
STATISTICS = EVERYTHING[2:]


def reference(rounds: int = 3, instruction: dict[str, Any] | None = None, **rules: Any) -> State:
    nodes = [Node(index, samples) for index, samples in enumerate(parts(SIZES))]
    asked = replace(INSTRUCTION, **(instruction or {}))
    return federated(make_model(), make_split(), nodes, rounds, asked, **rules)


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
    results = [reference(**rules) for rules in (CASES[name][1] for name in CASES if name != "fixbn by fraction")]
    for index, one in enumerate(results):
        for other in results[index + 1 :]:
            assert distance(one, other) > 1e-6


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
    long = Federation(make_model(), sizes=(20,))
    rounds = 4
    strategy = FedAvg(momentum_state="global", min_available_nodes=1, min_train_nodes=1, min_evaluate_nodes=1)
    got = long.run(strategy, rounds, momentum=0.9)
    nodes = [Node(0, parts((20,))[0])]
    asked = replace(INSTRUCTION, momentum=0.9)
    expected = federated(make_model(), make_split((20,)), nodes, rounds, asked, momentum="local")
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


def test_standalone_moves_nothing() -> None:
    federation = Federation(make_model())
    before = make_model().state_dict()
    after = federation.run(Standalone())
    assert all(bool((after[name] == before[name]).all()) for name in before)


def test_standalone_trains_every_node_as_if_it_were_alone() -> None:
    federation = Federation(make_model())
    federation.run(Standalone())
    nodes = [Node(index, samples) for index, samples in enumerate(parts(SIZES))]
    federated(make_model(), make_split(), nodes, 3, INSTRUCTION, stays=list(make_model().state_dict()))
    for node in nodes:
        kept = federation.grid.context(1000 + node.index).state.array_records["fedbn-flwr/personal"]
        assert distance(state.from_record(kept), node.kept) < 1e-12


@pytest.mark.parametrize("strategy", [FedBN, SiloBN, MTFL, Standalone])
def test_with_one_node_what_stays_and_what_is_sent_are_one_model(strategy: type[FedAvg]) -> None:
    federation = Federation(make_model(), sizes=(20,))
    alone: dict[str, Any] = {"min_available_nodes": 1, "min_train_nodes": 1, "min_evaluate_nodes": 1}
    sent = federation.run(strategy(**alone))
    kept = state.from_record(federation.grid.context(1000).state.array_records["fedbn-flwr/personal"])
    nodes = [Node(0, parts((20,))[0])]
    expected = federated(make_model(), make_split((20,)), nodes, 3, INSTRUCTION)
    assert distance({**sent, **kept}, expected) < 1e-12


@pytest.mark.parametrize("strategy", [FedBN, SiloBN, MTFL])
def test_without_bn_personal_layers_leave_fedavg(strategy: type[FedAvg]) -> None:
    one = Federation(make_model("gn")).run(strategy())
    other = Federation(make_model("gn")).run(FedAvg())
    assert distance(one, other) == 0


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


def test_partial_participation_draws_the_same_partitions_whatever_the_node_ids() -> None:
    class Noting(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            result = super().aggregate_train(server_round, replies)
            drawn[-1].append([reply.partition for reply in self.train_replies])
            return result

    drawn: list[list[list[int]]] = []
    for seed, grid in ((3, InProcessGrid), (3, Backwards), (4, InProcessGrid)):
        drawn.append([])
        Federation(make_model(), grid=grid).run(Noting(fraction_train=0.5, seed=seed), rounds=6)
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(nodes) == 2 for nodes in drawn[0])
    assert len(np.unique(drawn[0], axis=0)) > 1
