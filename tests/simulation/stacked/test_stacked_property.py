"""Whatever the method, the normalizer, its options, the sizes and the steps: stacked is as
alone.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr import models
from fedbn_flwr.norm import NORMS
from fedbn_flwr.strategies import (
    REGISTRY,
    CannotTrainError,
    FedAvg,
    FedBN,
    FedTAN,
    Scaffold,
)
from tests.helpers.engine_comparison import (
    EXACT,
    assert_same,
    both,
    difference,
    quiet,
    stacked_by,
)
from tests.helpers.harness import CLASSES, Double, make_model
from tests.strategies.test_contract import TABLE


def residual(norm: str) -> nn.Module:
    return Double(
        models.build("resnet20", num_classes=3, in_channels=1, image_size=8, norm=norm, seed=0)
    )


@pytest.mark.parametrize("name", [name for name in NORMS if name != "fixup"])
def test_normalizer(name: str) -> None:
    assert_same(
        lambda: quiet(FedAvg), lambda: make_model(name), local_steps=0, local_epochs=1, momentum=0.9
    )


@pytest.mark.parametrize("name", ["fixup", pytest.param("bn", marks=pytest.mark.slow)])
def test_normalizer_of_a_residual_network(name: str) -> None:
    assert_same(lambda: quiet(FedAvg), lambda: residual(name), rounds=1, local_steps=2, lr=0.01)


@pytest.mark.parametrize("strategy", [Scaffold, FedBN, FedTAN])
def test_first_timers_meet_veterans(strategy: type[FedAvg]) -> None:
    """Half of the nodes at a time: those with a memory are stacked apart from those without one."""
    options: dict[str, Any] = {"fraction_train": 0.5, "momentum_state": "local", "seed": 1}
    options |= {"carry": True} if strategy is FedTAN else {}
    sizes = (7, 12, 20, 5, 6, 9, 4, 8)
    alone, together = both(
        lambda: quiet(strategy, **options), rounds=5, momentum=0.9, nodes={"sizes": sizes}
    )
    assert difference(alone, together) < EXACT
    assert not together.watch.reasons
    assert together.watch.stacks[0] == 4
    assert set(together.watch.stacks) & {2, 3}


@pytest.mark.parametrize("strategy", [FedAvg, FedTAN])
def test_adam(strategy: type[FedAvg]) -> None:
    """Ten steps of unequal numbers."""
    # the bias before a BN layer has no gradient but rounding, which Adam divides by its own size
    # plus 1e-8
    options: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "rounds": 1}
    assert_same(lambda: quiet(strategy), within=1e-7, local_steps=0, local_epochs=2, **options)


def single() -> nn.Module:
    model = make_model()
    assert isinstance(model, Double)
    return model.net.float()


#: measured 2e-7 and 4e-3: a rounding of float32, and one of bfloat16
@pytest.mark.parametrize(("precision", "within"), [("float32", 1e-5), ("bf16", 5e-2)])
def test_a_round_in_low_precision(precision: str, within: float) -> None:
    options: dict[str, Any] = {
        "rounds": 1,
        "local_steps": 0,
        "local_epochs": 1,
        "precision": precision,
    }
    assert_same(lambda: quiet(FedAvg), single, within=within, **options)


@pytest.mark.parametrize(
    ("chunk", "portion", "stacks"),
    [(2, 100, [2, 2]), (3, 100, [3]), (1, 100, []), (4, 100, [4]), (4, 2, [2, 2])],
)
def test_small_chunks(
    chunk: int, portion: int, stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.in_process.PORTION", portion)
    options: dict[str, Any] = {"rounds": 2, "local_steps": 0, "local_epochs": 2, "momentum": 0.9}
    alone, together = both(lambda: quiet(Scaffold), grid=stacked_by(chunk), **options)
    assert difference(alone, together) < EXACT
    assert together.watch.stacks == stacks * 2
    assert not together.watch.reasons


Options = st.SearchStrategy[dict[str, Any]]
EXCHANGES: Options = st.sampled_from(
    [{"carry": True}, {"exchange": "fused"}, {"exchange": "paper"}]
)
#: by strategy, what it may be told beside the options of the contract's table
OPTIONS: dict[str, Options] = {
    "fedprox": st.fixed_dictionaries({"mu": st.sampled_from([0.01, 1.0])}),
    "fixbn": st.fixed_dictionaries({"freeze": st.sampled_from(["statistics", "affine", "both"])}),
    "fedtan": EXCHANGES,
    "feddna": EXCHANGES,
}
#: options of all strategies
SHARED = st.fixed_dictionaries(
    {
        "momentum_state": st.sampled_from(["none", "local", "global"]),
        "weighting": st.sampled_from(["examples", "uniform"]),
        "clip_norm": st.sampled_from([0.0, 0.5]),
    }
)
LENGTHS = st.one_of(
    st.fixed_dictionaries({"local_steps": st.integers(1, 4), "local_epochs": st.just(1)}),
    st.fixed_dictionaries({"local_steps": st.just(0), "local_epochs": st.integers(1, 2)}),
)
INSTRUCTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([*range(1, 8), 50]),
        # small steps: differences of rounding do not grow
        "lr": st.sampled_from([0.0, 0.01, 0.01, 0.01]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "augmentation": st.sampled_from(["none", "crop-flip", "crop:padding=2:fill=0"]),
        "replacement": st.booleans(),
        "seed": st.integers(0, 9),
    }
)
SIZES = st.lists(st.integers(1, 14), min_size=2, max_size=5).map(tuple)
#: why clients that could be stacked are not: what they remember, or what one of them cannot do
APART = ("remember different entries", "a mini-batch of 1", "BatchMoments does not work on")


def perceptron() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # no kink: of equal samples BN makes zeros, or what rounding makes of them
        layers = (
            nn.Linear(16, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(6, CLASSES),
        )
        return Double(nn.Sequential(nn.Flatten(), *layers))


def compare(name: str, data: st.DataObject) -> None:
    options, norm, _ = TABLE[name]
    options = options | data.draw(SHARED) | data.draw(OPTIONS.get(name, st.just({})))
    options = {key: value for key, value in options.items() if key not in REGISTRY[name].replaced}
    training: dict[str, Any] = (
        data.draw(INSTRUCTIONS) | data.draw(LENGTHS) | {"nodes": {"sizes": data.draw(SIZES)}}
    )
    flat = norm == "bn" and data.draw(st.booleans())
    try:
        alone, together = both(
            lambda: quiet(REGISTRY[name], **options),
            perceptron if flat else lambda: make_model(norm),
            **training,
        )
    except CannotTrainError:
        # every client has one sample, and BN needs more
        return
    assert difference(alone, together) < 1e-12
    assert not [
        said for said in together.watch.reasons if not any(reason in said for reason in APART)
    ]
    trained = {reply.partition for reply in alone.strategy.training.replies}
    assert trained == {reply.partition for reply in together.strategy.training.replies}


QUIET = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
}


@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=6, **QUIET)  # type: ignore[arg-type]
@given(st.data())
@pytest.mark.sampled(3)
def test_stacked_is_as_alone(name: str, data: st.DataObject) -> None:
    compare(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=40, **QUIET)  # type: ignore[arg-type]
@given(st.data())
def test_stacked_is_as_alone_in_many_cases(name: str, data: st.DataObject) -> None:
    compare(name, data)
