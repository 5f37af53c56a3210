"""FedBS beyond its reference: when it changes stage, and losses that cannot be weights."""

from typing import Any

import pytest
from flwr.app import RecordDict

from fedbn_flwr import wire
from fedbn_flwr.server.round import Round
from fedbn_flwr.strategies import CannotTrainError, FedBS, FedProx, NodeReply, Pooled
from tests.helpers.harness import Federation, make_model


def replies(*losses: Any) -> list[NodeReply]:
    return [
        NodeReply(
            index,
            index,
            1,
            {"local-loss": loss, "train-loss": 7.0 * index},
            {wire.ARRAYS: {}},
            RecordDict(),
        )
        for index, loss in enumerate(losses)
    ]


def learn(strategy: FedBS, *losses: float) -> list[float]:
    """Take a round's replies, and return their weights."""
    weights = strategy.weigh(sent := replies(*losses))
    strategy.update(Pooled({}, {}, {}, sent))
    return weights


def test_stage_two_needs_consecutive_calm_rounds() -> None:
    strategy = FedBS(epsilon=0.1, patience_rounds=3)
    # population deviations: 0.1, which is calm, 0.5, then three calm ones
    for losses, stage in (
        ((1.0, 1.2), 1),
        ((1.0, 2.0), 1),
        ((1.0, 1.1), 1),
        ((1.0, 1.0), 1),
        ((0.5, 0.5), 2),
    ):
        learn(strategy, *losses)
        assert strategy.state.stage == stage
    assert learn(strategy, 1.0, 9.0) == [1.0, 1.0]
    assert strategy.state.stage == 2


@pytest.mark.parametrize(("second", "stage"), [(2.0, 2), (2.0 + 2**-40, 1)])
def test_losses_agree_at_epsilon_and_not_above(second: float, stage: int) -> None:
    """Of 1 and 2, the population's deviation is 0.5 in floating point, too."""
    strategy = FedBS(epsilon=0.5, patience_rounds=1)
    learn(strategy, 1.0, second)
    assert strategy.state.stage == stage


def test_the_papers_numbers_are_the_defaults() -> None:
    """Section IV: "epsilon = 0.1 and r = 5 for experimentation"."""
    assert (FedBS().epsilon, FedBS().patience_rounds) == (0.1, 5)
    # FedBS's paper gives no mu; FedProx's tries 0.001, 0.01, 0.1 and 1
    assert FedBS().mu == FedProx().mu == 0.01


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), None])
def test_a_loss_that_cannot_be_a_weight_counts_as_nothing_and_is_said(
    bad: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert FedBS().weigh(replies(2.0, bad, 1.0)) == [2.0, 0.0, 1.0]
    assert any(
        "FedBS: node 1 reports the local-loss" in record.getMessage() for record in caplog.records
    )


def test_what_it_measured_is_noted() -> None:
    strategy = FedBS(epsilon=1e9, patience_rounds=2)
    Federation(make_model()).run(strategy, 1)
    assert strategy.training.measured["fedbs-stage"] == 1
    assert strategy.training.measured["loss-deviation"] > 0
    # a subclass may have measured something before; a loss of zero counts
    strategy.round = Round(measured={"rate": 0.5})
    learn(strategy, 0.0, 3.0)
    assert strategy.round.measured == {"rate": 0.5, "fedbs-stage": 1, "loss-deviation": 1.5}
    assert strategy.state.stage == 2
    strategy.round = Round()
    learn(strategy, 1.0, 3.0)
    assert strategy.round.measured == {"fedbs-stage": 2}


def test_without_the_training_loss_the_remedy_is_named() -> None:
    silent = [NodeReply(7, 7, 1, {"train_loss": 2.0}, {}, RecordDict())]
    with pytest.raises(
        CannotTrainError,
        match=r"node 7 sent train_loss; name the one that holds it: .*loss_key=\.\.\.",
    ):
        FedBS(loss="running").weigh(silent)


def test_rounds_without_a_usable_loss_are_not_calm() -> None:
    strategy = FedBS(epsilon=0.1, patience_rounds=1)
    assert (
        strategy.weigh(replies(0.0, 0.0))
        == learn(strategy, float("nan"), float("inf"))
        == [1.0, 1.0]
    )
    assert (strategy.state.stage, strategy.round.measured["loss-deviation"]) == (1, float("inf"))
