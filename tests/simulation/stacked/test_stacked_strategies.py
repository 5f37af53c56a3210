"""Every strategy and every normalizer is stacked, and what is known of chunks, precision, memories and optimizers."""

from typing import Any

import pytest
from torch import nn

from fedbn_flwr import models
from fedbn_flwr.norm import NORMS
from fedbn_flwr.strategies import (
    REGISTRY,
    FedAvg,
    FedBN,
    FedTAN,
    FixBN,
    Scaffold,
)
from tests.helpers.engine_comparison import (
    EXACT,
    Stacked,
    assert_same,
    both,
    difference,
    quiet,
    run,
    stacked_by,
)
from tests.helpers.harness import Double, make_model
from tests.strategies.test_contract import TABLE


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


def test_stacking_is_as_reproducible_as_training_alone() -> None:
    one, other = (run(Stacked, quiet(Scaffold), local_steps=0, local_epochs=2) for _ in range(2))
    assert difference(one, other) == 0
