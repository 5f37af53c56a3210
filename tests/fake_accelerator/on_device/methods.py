"""Every method on the simulated device, or on the one that the variable DEVICE names, against the
CPU.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import MTFL, REGISTRY, BaseStrategy, FedAvg, FedTAN
from tests.clientapp import test_own_loop as own
from tests.helpers.engine_comparison import EXACT, Stacked, watching
from tests.helpers.harness import SIZES, Federation, distance, make_model
from tests.strategies.test_contract import TABLE

Case = tuple[Callable[[], BaseStrategy], str]


def _row(name: str) -> Case:
    return lambda: REGISTRY[name](**TABLE[name][0]), TABLE[name][1]


DEVICE = os.environ.get("DEVICE", "fake")
IS_FAKE = DEVICE == "fake"
#: how far an operation of the device may round in another way in float64, where it is not the CPU's
WITHIN = 0.0 if IS_FAKE else EXACT
#: Adam divides by the root of a square, which is small in the first steps
WITHIN_ADAM = 0.0 if IS_FAKE else 1e-9
#: what their nodes do, those of another method do as well
SAME_NODES = {"silobn", "mtfl", "standalone", "centralized", "fednorm", "fedtan-ii"}
CASES: dict[str, Case] = {
    **{name: _row(name) for name in TABLE if name not in SAME_NODES},
    "fedtan, carried": (lambda: FedTAN(carry=True), "bn"),
    "fedtan, paper": (lambda: FedTAN(exchange="paper"), "bn"),
    "own statistics": (lambda: MTFL(statistics="own"), "bn"),
    "batch renormalization": (FedAvg, "brn"),
    "group normalization": (FedAvg, "gn"),
    "weight standardization": (FedAvg, "bn-ws"),
}
KEPT: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {"optimizer": "adam", "lr": 0.01},
}


@cache
def end_of(
    name: str, device: str, grid: type[InProcessGrid] = InProcessGrid
) -> dict[str, torch.Tensor]:
    make, norm = CASES[name]
    return dict(Federation(make_model(norm), device=device, grid=grid).run(make(), 2))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_one_after_another_has_the_bits_of_the_cpu(name: str) -> None:
    wanted, ended = end_of(name, "cpu"), end_of(name, DEVICE)
    # torch composes group normalization of other operations on devices that it does not know
    within = EXACT if name == "group normalization" else WITHIN
    assert distance(wanted, ended) <= within


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(4)
def test_stacks_agree_with_the_cpu(name: str) -> None:
    with watching() as watch:
        assert distance(end_of(name, "cpu"), end_of(name, DEVICE, Stacked)) < EXACT
    assert not [
        reason for reason in watch.reasons if "does not work on stacked models" not in reason
    ]


@pytest.mark.parametrize("where", ["local", "global"])
@pytest.mark.parametrize("optimizer", KEPT)
@pytest.mark.sampled(1)
def test_kept_states_of_optimizers_have_the_bits_of_the_cpu(optimizer: str, where: str) -> None:
    options = KEPT[optimizer]
    ends = [
        Federation(make_model(), device=device).run(FedAvg(momentum_state=where), 3, **options)
        for device in ("cpu", DEVICE)
    ]
    assert distance(*ends) <= (WITHIN_ADAM if optimizer == "adam" else WITHIN)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method in ("fedtan", "scaffold") else pytest.mark.slow)
        for method in sorted(own.METHODS.keys() - {"fedbn", "fedbs", "global momentum"})
    ],
)
@pytest.mark.sampled(1)
def test_own_loops_end_and_obey(method: str) -> None:
    made = own.make_without_bn if method == "fedwon" else own.make
    asked: dict[str, Any] = {"lr": 0.05, "momentum": own.momentum_of(method)}

    def loop(model: torch.nn.Module, batches: Any, lr: float, momentum: float) -> float:
        moved = ((inputs.to(DEVICE), targets.to(DEVICE)) for inputs, targets in batches)
        return own.plain_loop(model.to(DEVICE), moved, lr, momentum)

    grid = InProcessGrid(own.own_app(loop, made, **own.COUNTED), len(SIZES))
    ended = Federation(made()).run(own.METHODS[method](), own.ROUNDS, grid=grid, **asked)
    assert distance(ended, own.wanted_of(method)) < (own.EXACT if IS_FAKE else EXACT)
