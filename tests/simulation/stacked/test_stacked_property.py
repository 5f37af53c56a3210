"""Whatever the method, its options, the sizes, the batches and the steps: stacked is as alone."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr.strategies import REGISTRY, CannotTrainError
from tests.helpers.engine_comparison import both, difference, quiet
from tests.helpers.harness import CLASSES, Double, make_model
from tests.strategies.test_contract import TABLE

Options = st.SearchStrategy[dict[str, Any]]
EXCHANGES = st.sampled_from([{"carry": True}, {"exchange": "fused"}, {"exchange": "paper"}])
FRESH = st.fixed_dictionaries({"fresh_optimizer": st.booleans()})
#: by strategy, what it may be told beside the options of the contract's table
OPTIONS: dict[str, Options] = {
    "fedprox": st.fixed_dictionaries({"mu": st.sampled_from([0.01, 1.0])}),
    "fixbn": st.fixed_dictionaries({"freeze": st.sampled_from(["statistics", "affine", "both"])}),
    "fedtan": st.builds(dict.__or__, EXCHANGES, FRESH),
    "fedtan-ii": FRESH,
    "feddna": st.builds(dict.__or__, EXCHANGES, FRESH),
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
APART = ("remember different entries", "before there is momentum", "a mini-batch of 1")


def perceptron() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # no kink: of equal samples BN makes zeros, or what rounding makes of them
        layers = nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
        return Double(nn.Sequential(nn.Flatten(), *layers))


def compare(name: str, data: st.DataObject) -> None:
    options, norm, _ = TABLE[name]
    options = options | data.draw(SHARED) | data.draw(OPTIONS.get(name, st.just({})))
    training: dict[str, Any] = data.draw(INSTRUCTIONS) | data.draw(LENGTHS) | {"nodes": {"sizes": data.draw(SIZES)}}
    flat = norm == "bn" and data.draw(st.booleans())
    try:
        alone, together = both(
            lambda: quiet(REGISTRY[name], **options), perceptron if flat else lambda: make_model(norm), **training
        )
    except CannotTrainError:
        # every client has one sample, and BN needs more
        return
    assert difference(alone, together) < 1e-12
    assert not [said for said in together.watch.reasons if not any(reason in said for reason in APART)]
    trained = {reply.partition for reply in alone.strategy.train_replies}
    assert trained == {reply.partition for reply in together.strategy.train_replies}


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "derandomize": True}


@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=6, **QUIET)  # type: ignore[arg-type]
@given(st.data())
def test_stacked_is_as_alone(name: str, data: st.DataObject) -> None:
    compare(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=40, **QUIET)  # type: ignore[arg-type]
@given(st.data())
def test_stacked_is_as_alone_in_many_cases(name: str, data: st.DataObject) -> None:
    compare(name, data)
