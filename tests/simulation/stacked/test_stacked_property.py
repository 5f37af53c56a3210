"""Whatever the sizes, the batches, the steps and the rules: stacked is as alone."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr import norm
from fedbn_flwr.strategies import REGISTRY, CannotTrainError
from tests.helpers.engine_comparison import both, difference, quiet
from tests.helpers.harness import CLASSES, Double, make_model

SHARED: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"carry": True}, {"exchange": "fused"}, {"exchange": "paper"}]
)
#: by strategy, what it may be told
METHODS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "fedavg": st.just({}),
    "fedprox": st.fixed_dictionaries({"mu": st.sampled_from([0.01, 1.0])}),
    "fixbn": st.fixed_dictionaries({"freeze_round": st.just(1), "freeze": st.sampled_from(["statistics", "both"])}),
    "fedbn": st.just({}),
    "scaffold": st.just({}),
    "fedwon": st.just({"agc": "on"}),
    "fedtan": st.builds(lambda shared, fresh: {**shared, "fresh_optimizer": fresh}, SHARED, st.booleans()),
    "feddna": SHARED,
    "fedbs": st.just({}),
}
#: why clients that could be stacked are not: what they remember, or what one of them cannot do
APART = ("remember different entries", "before there is momentum", "a mini-batch of 1")


def perceptron() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # no kink: of equal samples BN makes zeros, or what rounding makes of them
        layers = nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
        return Double(nn.Sequential(nn.Flatten(), *layers))


def standardized() -> nn.Module:
    model = make_model("gn-ws")
    assert not norm.bn_layers(model)
    return model


MODELS = {"cnn": make_model, "mlp": perceptron, "gn-ws": standardized}

LENGTHS = st.one_of(
    st.fixed_dictionaries({"local_steps": st.integers(1, 4), "local_epochs": st.just(1)}),
    st.fixed_dictionaries({"local_steps": st.just(0), "local_epochs": st.integers(1, 2)}),
)
INSTRUCTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 7),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "augmentation": st.sampled_from(["none", "crop-flip"]),
        "replacement": st.booleans(),
        "seed": st.integers(0, 9),
    }
)


def compare(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(METHODS)))
    options = dict(data.draw(METHODS[name]))
    options["momentum_state"] = data.draw(st.sampled_from(["none", "local", "global"]))
    kind = data.draw(st.sampled_from(sorted(MODELS)))
    instruction = data.draw(INSTRUCTIONS) | data.draw(LENGTHS)
    sizes = tuple(data.draw(st.lists(st.integers(1, 14), min_size=2, max_size=5)))
    # small steps: differences of rounding do not grow
    training: dict[str, Any] = {**instruction, "lr": 0.01, "rounds": 2, "nodes": {"sizes": sizes}}
    try:
        alone, together = both(lambda: quiet(REGISTRY[name], **options), MODELS[kind], **training)
    except CannotTrainError:
        # every client has one sample, and BN needs more
        return
    assert difference(alone, together) < 1e-12
    assert not [said for said in together.watch.reasons if not any(reason in said for reason in APART)]
    trained = {reply.partition for reply in alone.strategy.train_replies}
    assert trained == {reply.partition for reply in together.strategy.train_replies}


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "derandomize": True}


@settings(max_examples=12, **QUIET)  # type: ignore[arg-type]
@given(st.data())
def test_stacked_is_as_alone(data: st.DataObject) -> None:
    compare(data)


@pytest.mark.slow
@settings(max_examples=150, **QUIET)  # type: ignore[arg-type]
@given(st.data())
def test_stacked_is_as_alone_in_many_cases(data: st.DataObject) -> None:
    compare(data)
