"""Every strategy and every normalizer trains stacked to what it trains one after another."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from fedbn_flwr import models
from fedbn_flwr.norm import NORMS
from fedbn_flwr.strategies import (
    REGISTRY,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FedWon,
    FixBN,
    Scaffold,
    prepare,
)
from tests.helpers.engine_comparison import (
    EXACT,
    SIZES_APART,
    Stacked,
    assert_same,
    both,
    difference,
    quiet,
    run,
    stacked_by,
)
from tests.helpers.harness import SIZES, Double, make_model
from tests.strategies.test_contract import TABLE

#: the others take steps of equal number in `test_options`, or differ on the server only
WITHOUT_OPTIONS = ("fedtan", "hbn", "scaffold")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in REGISTRY if name not in WITHOUT_OPTIONS]


@pytest.mark.parametrize("name", [*WITHOUT_OPTIONS, *SLOW])
def test_strategy(name: str) -> None:
    options, norm, _ = TABLE[name]
    assert_same(lambda: quiet(REGISTRY[name], **options), lambda: make_model(norm))


@pytest.mark.parametrize("name", REGISTRY)
def test_strategy_with_epochs_and_momentum(name: str) -> None:
    """Clients have 5, 3, 2 and 1 steps an epoch, and batches of 5, 4, 3 samples."""
    options, norm, _ = TABLE[name]
    assert_same(
        lambda: quiet(REGISTRY[name], **options),
        lambda: make_model(norm),
        rounds=2,
        local_steps=0,
        local_epochs=2,
        momentum=0.9,
        weight_decay=0.1,
    )


def residual(norm: str) -> nn.Module:
    return Double(models.build("resnet20", num_classes=3, in_channels=1, image_size=8, norm=norm, seed=0))


@pytest.mark.parametrize("name", [name for name in NORMS if name != "fixup"])
def test_normalizer(name: str) -> None:
    assert_same(lambda: quiet(FedAvg), lambda: make_model(name), local_steps=0, local_epochs=1, momentum=0.9)


@pytest.mark.parametrize("name", ["fixup", pytest.param("bn", marks=pytest.mark.slow)])
def test_normalizer_of_a_residual_network(name: str) -> None:
    assert_same(lambda: quiet(FedAvg), lambda: residual(name), rounds=1, local_steps=2, lr=0.01)


OPTIONS: dict[str, tuple[type[FedAvg], dict[str, Any], dict[str, Any]]] = {
    "one step": (FedAvg, {}, {"local_steps": 1}),
    "momentum kept": (FedAvg, {"momentum_state": "local"}, {"momentum": 0.9}),
    "momentum kept, epochs": (
        FedAvg,
        {"momentum_state": "local"},
        {"momentum": 0.9, "weight_decay": 0.1, "local_steps": 0, "local_epochs": 2},
    ),
    "momentum averaged": (FedAvg, {"momentum_state": "global"}, {"momentum": 0.9}),
    "momentum averaged, epochs": (
        FedAvg,
        {"momentum_state": "global"},
        {"momentum": 0.9, "local_steps": 0, "local_epochs": 2},
    ),
    "momentum averaged, without what stays": (FedBN, {"momentum_state": "global"}, {"momentum": 0.9}),
    "kept momentum of plain SGD": (FedAvg, {"momentum_state": "local"}, {}),
    "a server optimizer": (FedAvg, {"server_optimizer": "momentum", "server_lr": 0.5}, {}),
    "uniform weights": (FedAvg, {"weighting": "uniform"}, {}),
    "carried corrections": (FedTAN, {"carry": True}, {"momentum": 0.9}),
    "carried corrections of ragged batches, uniform": (
        FedTAN,
        {"carry": True, "weighting": "uniform", "fresh_optimizer": True},
        {"batch_size": 8, "local_steps": 0, "local_epochs": 2, "momentum": 0.9},
    ),
    "carried statistics": (FedDNA, {"carry": True}, {"local_steps": 1}),
    "frozen statistics": (FixBN, {"freeze_round": 1, "freeze": "statistics"}, {}),
    "frozen parameters": (FixBN, {"freeze_round": 1, "freeze": "affine"}, {"momentum": 0.9}),
    "all of BN frozen": (FixBN, {"freeze_round": 1, "freeze": "both"}, {"local_steps": 0, "local_epochs": 1}),
    "kept momentum of frozen parameters": (
        FixBN,
        {"freeze_round": 1, "freeze": "both", "momentum_state": "local"},
        {"momentum": 0.9},
    ),
    "a proximal term": (FedProx, {"mu": 0.5}, {"momentum": 0.9}),
    "variates of unequal steps": (Scaffold, {}, {"local_steps": 0, "local_epochs": 1, "momentum": 0.5}),
    "FedBS": (FedBS, {}, {"local_steps": 0, "local_epochs": 2, "momentum": 0.9, "weight_decay": 0.1}),
    "clipping": (FedWon, {"agc": "on"}, {"momentum": 0.9, "local_steps": 0, "local_epochs": 1}),
    "a bound on the norm": (Scaffold, {"clip_norm": 0.5}, {"momentum": 0.9, "local_steps": 0, "local_epochs": 1}),
    "batches drawn anew": (FedAvg, {}, {"replacement": True, "local_steps": 0, "local_epochs": 1}),
    "augmentation": (FedAvg, {}, {"augmentation": "crop-flip", "local_steps": 0, "local_epochs": 2}),
    "black border": (FedAvg, {}, {"augmentation": "crop:padding=2:fill=0"}),
    "batches of one": (FedAvg, {}, {"batch_size": 1}),
    "whole data sets": (FedAvg, {}, {"batch_size": 50}),
    "no learning rate": (Scaffold, {}, {"lr": 0.0}),
}


@pytest.mark.parametrize("sizes", [SIZES, SIZES_APART], ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, sizes: Sequence[int]) -> None:
    strategy, options, instruction = OPTIONS[case]
    nodes = {"sizes": sizes}
    assert_same(lambda: quiet(strategy, **options), lambda: prepare(make_model(), strategy), nodes=nodes, **instruction)


@pytest.mark.parametrize("strategy", [Scaffold, FedBN, FedTAN])
def test_first_timers_meet_veterans(strategy: type[FedAvg]) -> None:
    """Half of the nodes at a time: those with a memory are stacked apart from those without one."""
    options: dict[str, Any] = {"fraction_train": 0.5, "momentum_state": "local", "seed": 1}
    options |= {"carry": True} if strategy is FedTAN else {}
    sizes = (7, 12, 20, 5, 6, 9, 4, 8)
    alone, together = both(lambda: quiet(strategy, **options), rounds=5, momentum=0.9, nodes={"sizes": sizes})
    assert difference(alone, together) < EXACT
    assert not together.watch.reasons
    assert together.watch.stacks[0] == 4
    assert set(together.watch.stacks) & {2, 3}


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam(optimizer: str) -> None:
    """Ten steps of unequal numbers."""
    options: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "weight_decay": 0.1, "rounds": 1}
    options |= {"local_steps": 0, "local_epochs": 2}
    assert_same(lambda: quiet(FedAvg), lambda: make_model("none"), **options)
    # the bias before a BN layer has no gradient but rounding, which Adam divides by its own size plus 1e-8
    assert_same(lambda: quiet(FedAvg), within=1e-7, **options)


def test_adam_that_keeps_its_state_is_left_alone() -> None:
    alone, together = both(
        lambda: quiet(FedAvg, momentum_state="local"), optimizer="adam", lr=0.01, local_steps=0, local_epochs=1
    )
    assert difference(alone, together) == 0
    assert together.watch.reasons == ["the state of adam counts the steps of all clients of a stack alike"]


def test_a_rule_that_cannot_be_stacked_is_left_alone() -> None:
    alone, together = both(lambda: quiet(FixBN, freeze_round="auto", latest=1.0))
    assert difference(alone, together) == 0
    assert together.watch.reasons == ["StatisticsChange does not work on stacked models"]


def single() -> nn.Module:
    model = make_model()
    assert isinstance(model, Double)
    return model.net.float()


#: measured 2e-7 and 4e-3: a rounding of float32, and one of bfloat16
@pytest.mark.parametrize(("precision", "within"), [("float32", 1e-5), ("bf16", 5e-2)])
def test_a_round_in_low_precision(precision: str, within: float) -> None:
    options: dict[str, Any] = {"rounds": 1, "local_steps": 0, "local_epochs": 1, "precision": precision}
    assert_same(lambda: quiet(FedAvg), single, within=within, **options)


@pytest.mark.parametrize(("chunk", "stacks"), [(2, [2, 2]), (3, [3]), (1, []), (4, [4])])
def test_small_chunks(chunk: int, stacks: list[int]) -> None:
    options: dict[str, Any] = {"rounds": 2, "local_steps": 0, "local_epochs": 2, "momentum": 0.9}
    alone, together = both(lambda: quiet(Scaffold), grid=stacked_by(chunk), **options)
    assert difference(alone, together) < EXACT
    assert together.watch.stacks == stacks * 2
    assert not together.watch.reasons


def test_one_client() -> None:
    """There is nothing to be stacked."""
    alone, together = both(lambda: quiet(FedAvg), nodes={"sizes": (9,)})
    assert difference(alone, together) == 0
    assert not together.watch.stacks
    assert not together.watch.reasons


@pytest.mark.parametrize("sizes", [(5, 7), (9, 12, 5), (4, 9, 8, 13), (3, 20, 1, 6)])
def test_whatever_the_order_of_sizes(sizes: tuple[int, ...]) -> None:
    """A last batch of one sample is merged: 9 samples are fewer steps than 12, and as many as 8."""
    options: dict[str, Any] = {"local_steps": 0, "local_epochs": 2, "momentum": 0.9}
    assert_same(lambda: quiet(Scaffold), clients=2 * len(sizes), nodes={"sizes": sizes}, **options)


def test_stacking_is_as_reproducible_as_training_alone() -> None:
    one, other = (run(Stacked, quiet(Scaffold), local_steps=0, local_epochs=2) for _ in range(2))
    assert difference(one, other) == 0


@pytest.mark.parametrize("name", ["scaffold", "fedbn"])
def test_rounds_go_on_from_what_nodes_keep(name: str) -> None:
    """Six rounds: differences do not grow."""
    assert_same(lambda: quiet(REGISTRY[name]), rounds=6, momentum=0.9)
