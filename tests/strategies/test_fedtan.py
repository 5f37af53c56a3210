"""FedTAN, FedDNA and FedTAN-II over messages, in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedbn_flwr import state
from fedbn_flwr.strategies import FedAvg, FedDNA, FedTAN, FedTANII, Scaffold
from fedbn_flwr.transports.counting_grid import CountingGrid
from tests.helpers.harness import (
    ALONE,
    INSTRUCTION,
    SIZES,
    Double,
    Federation,
    assert_all_differ,
    distance,
    make_model,
    make_split,
)
from tests.helpers.layerwise_references import gradients
from tests.helpers.references import make_nodes, mini_batches

#: uses of BN layers in the harness's model
LAYERS = 2


def run(
    strategy: FedAvg, rounds: int = 3, model: nn.Module | None = None, **options: Any
) -> state.State:
    sizes = options.pop("sizes", SIZES)
    return Federation(model or make_model(), sizes).run(strategy, rounds, **options)


def exchanges(
    strategy: FedAvg, rounds: int = 1, model: nn.Module | None = None, **options: Any
) -> int:
    nodes = Federation(model or make_model(), options.pop("sizes", SIZES))
    grid = CountingGrid(nodes.grid)
    nodes.run(strategy, rounds, grid=grid, **options)
    return grid.training.exchanges


def by_hand(weights: tuple[float, ...], **options: Any) -> state.State:
    """One round with E = 1: gradients as of all clients, a step of SGD, the weighted mean."""
    model, split = make_model(), make_split()
    asked = replace(INSTRUCTION, server_round=1, local_steps=1)
    batches = [mini_batches(split, node, asked, True)[0] for node in make_nodes()]
    found = gradients(model, batches, weights, F.cross_entropy, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for weight, each in zip(weights, found, strict=True):
                parameter.sub_(asked.lr * weight / sum(weights) * each[name])
    return model.state_dict()


HAND: dict[str, tuple[Callable[[], FedAvg], tuple[float, ...], dict[str, Any]]] = {
    "fused": (FedTAN, SIZES, {}),
    "paper": (lambda: FedTAN(exchange="paper"), SIZES, {"mode": "paper"}),
    "uniform": (lambda: FedTAN(weighting="uniform"), (1, 1, 1, 1), {}),
    "forward": (FedDNA, SIZES, {"mode": "forward"}),
}


@pytest.mark.parametrize("case", HAND)
def test_a_round_is_a_step_by_hand(case: str) -> None:
    make, weights, options = HAND[case]
    assert distance(run(make(), 1, local_steps=1), by_hand(weights, **options)) < 1e-12


def test_the_ways_differ() -> None:
    ways = [HAND[case][1:] for case in HAND if case != "paper"]
    assert_all_differ([by_hand(weights, **options) for weights, options in ways], by=1e-5)


@pytest.mark.parametrize("exchange", ["fused", "paper"])
def test_with_equal_data_it_follows_centralized_sgd(exchange: Any) -> None:
    sizes, rounds = (6, 6, 6), 8
    found = run(FedTAN(exchange=exchange), rounds, sizes=sizes, local_steps=1, batch_size=6)
    model, split = make_model(), make_split(sizes)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=INSTRUCTION.lr)
    for _ in range(rounds):
        optimizer.zero_grad()
        F.cross_entropy(model(split.inputs), split.labels).backward()
        optimizer.step()
    assert distance(found, model.state_dict()) < 1e-9
    assert distance(run(FedAvg(), rounds, sizes=sizes, local_steps=1, batch_size=6), found) > 1e-2


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("make", [FedTAN, FedDNA])
def test_one_client_is_fedavg(make: Callable[..., FedAvg], carry: bool) -> None:
    one, plain = (
        run(each, sizes=(9,), momentum=0.9)
        for each in (make(carry=carry, **ALONE), FedAvg(**ALONE))
    )
    assert distance(one, plain) < 1e-12


def test_fedtan_ii_is_fedavg_after_the_freeze() -> None:
    strategy = FedTANII(m=2, lr_schedule="=0.01@freeze", fraction_evaluate=0.0)
    assert exchanges(strategy, 5) == 2 * (2 * LAYERS + 1) + 3
    assert (strategy.round.instruction.freeze, strategy.round.instruction.layerwise) == (
        "statistics",
        "none",
    )
    assert strategy.round.instruction.lr == 0.01
    early, late = run(FedTANII(m=2), 2), run(FedTANII(m=2), 5)
    statistics = state.group_keys(make_model(), "statistics")
    assert all(torch.equal(early[key], late[key]) for key in statistics)
    assert exchanges(FedTANII(m=0.4), 5) == 2 * (2 * LAYERS + 1) + 3


COMBINED: dict[str, dict[str, Any]] = {
    "half of the nodes": {"fraction_train": 0.5},
    "a server optimizer": {"server_optimizer": "momentum", "server_lr": 0.5},
    "momentum on the nodes": {"momentum_state": "local"},
    "momentum on the server": {"momentum_state": "global"},
    "a schedule": {"lr_schedule": "0.1@2"},
}


@pytest.mark.parametrize("case", COMBINED)
@pytest.mark.sampled(2)
def test_options_of_every_strategy_work(case: str) -> None:
    options = COMBINED[case]
    tan, paper, plain = (
        run(strategy, momentum=0.9)
        for strategy in (FedTAN(**options), FedTAN(exchange="paper", **options), FedAvg(**options))
    )
    assert distance(tan, paper) < 1e-10
    assert distance(tan, plain) > 1e-3
    assert distance(tan, run(FedTAN(), momentum=0.9)) > 1e-6


def test_it_can_be_combined_with_another_method() -> None:
    """Only the last reply of a layer-wise step holds the control variates."""

    class Both(FedTAN, Scaffold):
        state: Any

    both, paper = run(Both()), run(Both(exchange="paper"))
    assert distance(both, paper) < 1e-10
    assert distance(both, run(FedTAN())) > 1e-3
    assert distance(both, run(Scaffold())) > 1e-3


class Twice(nn.Module):
    """Uses one BN layer twice: it has exchanges of each use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs.flatten(1)))
        result: torch.Tensor = self.last(self.norm(hidden))
        return result


class OnInputs(nn.Sequential):
    """BN of the data only: there are no gradients to ask for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("model", "make", "wanted"),
    [(Twice, FedDNA, 3), (Twice, FedTAN, 5), (OnInputs, FedTAN, 2), (OnInputs, FedDNA, 2)],
)
def test_exchanges_follow_the_uses_of_layers(
    model: type[nn.Module], make: Callable[[], FedAvg], wanted: int
) -> None:
    assert exchanges(make(), model=Double(model()), local_steps=1) == wanted
    found = run(make(), 1, model=Double(model()), local_steps=1)
    paper = run(FedTAN(exchange="paper"), 1, model=Double(model()), local_steps=1)
    assert (distance(found, paper) < 1e-10) == (make is FedTAN or model is OnInputs)


def test_a_plain_message_cannot_ask_for_a_layer_wise_step() -> None:
    model = make_model()
    nodes = Federation(model)
    client = nodes.client(nodes.grid.context(1000))
    with pytest.raises(ValueError, match=r"train\.layerwise"):
        client.train({"arrays": model.state_dict()}, replace(INSTRUCTION, layerwise="fused"))
