"""FixBN: what it announces before its freeze, its sliding window by hand, and the rate from the
freeze on.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from fedbn_flwr.server.round import Round
from fedbn_flwr.strategies import FedTANII, FixBN, NodeReply, Pooled
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, distance, make_model, make_split
from tests.helpers.references import Node, make_nodes, mini_batches

REPORTED = "statistics-change-variance"


class Noting(FixBN):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        notes: list[Any] = self.__dict__.setdefault("notes", [])
        notes.append(
            (
                {reply.partition: dict(reply.metrics) for reply in self.training.replies},
                dict(self.training.measured),
            )
        )
        return result


def test_the_largest_counts_once_half_of_the_recent_clients_report() -> None:
    def largest(server_round: int, *reports: tuple[int, float | None]) -> Any:
        metrics = [(node, {} if value is None else {REPORTED: value}) for node, value in reports]
        replies = [NodeReply(node, node, 1, each, {}, RecordDict()) for node, each in metrics]
        strategy.round = Round(server_round)
        strategy.update(Pooled({}, {}, {}, replies))
        return strategy.round.measured.get(REPORTED)

    strategy = FixBN(freeze_round="auto", window=3, threshold=0.0, latest=1.0)
    strategy.num_rounds = 100
    assert largest(1, (0, None), (1, None), (2, None), (3, None)) is None
    assert largest(2, (0, 9.0)) is None
    assert largest(3, (0, 0.2), (1, 0.5)) == 0.5
    # in round 4 the window is of rounds 2, 3 and 4, in which two of three clients have reported
    assert largest(4, (4, None)) == 0.5
    assert largest(5, (5, None), (6, None)) is None


def test_it_freezes_at_the_latest_although_a_round_is_lost() -> None:
    class WithoutTheSecond(FixBN):
        def ask(self, *given: Any) -> Any:
            return [] if self.round.number == 2 else super().ask(*given)

    strategy = WithoutTheSecond(
        freeze_round="auto", threshold=0.0, latest=0.5, fraction_evaluate=0.0
    )
    Federation(make_model()).run(strategy, 4)
    assert strategy.state.frozen_after == 2


def layer_inputs(node: Node, server_round: int) -> list[list[torch.Tensor]]:
    """Return the inputs of both BN layers, for every mini-batch of a round, as (samples, channels,
    positions).
    """
    model = make_model()
    net = model.net
    assert isinstance(net, torch.nn.Sequential)
    asked = replace(INSTRUCTION, server_round=server_round, lr=0.0)
    with torch.no_grad():
        drawn = [inputs.double() for inputs, _ in mini_batches(make_split(), node, asked, True)]
        return [[net.train()[:layer](inputs).flatten(2) for inputs in drawn] for layer in (1, 4)]


def by_hand(node: Node, rounds: Sequence[int]) -> float:
    """Return the relative variance of the changes between these rounds."""
    ratios = list[float]()
    every = [layer_inputs(node, server_round) for server_round in rounds]
    for layer in (0, 1):
        ratios.append(0.0)
        for kind in ("mean", "variance"):
            statistics, errors = [], []
            for seen in every:
                batches = []
                for values in seen[layer]:
                    mean = values.mean((0, 2))
                    # one number for each sample, whose mean over the samples is the mini-batch's
                    # statistic
                    each = (
                        values.mean(2)
                        if kind == "mean"
                        else ((values - mean[:, None]) ** 2).mean(2)
                    )
                    batches.append((each.mean(0).numpy(), each.var(0).numpy() / len(each)))
                statistics.append(np.mean([one for one, _ in batches], axis=0))
                errors.append(np.mean([error for _, error in batches], axis=0) / len(batches))
            changes = np.diff(statistics, axis=0)
            noise = np.mean([one + other for one, other in pairwise(errors)], axis=0)
            ratios[-1] += changes.var(0, ddof=1).sum() / noise.sum() / 2
    return max(ratios)


# with 1, a client's change is just outside of its next window
@pytest.mark.parametrize("seed", [1, 2])
def test_an_absent_client_compares_with_its_last_participation_and_windows_are_rounds(
    seed: int,
) -> None:
    strategy = Noting(
        freeze_round="auto", window=4, threshold=0.0, latest=1.0, fraction_train=0.5, seed=seed
    )
    Federation(make_model()).run(strategy, 12, lr=0.0)
    taken: dict[int, list[int]] = {index: [] for index in range(len(SIZES))}
    reported = absent = 0
    for server_round, (each, _) in enumerate(strategy.__dict__["notes"], 1):
        for index, metrics in each.items():
            taken[index].append(server_round)
            # a change belongs to the round that ends it
            ends = [number for number in taken[index][1:] if number > server_round - 4]
            expected = len(ends) >= 2 and taken[index][0] <= server_round - 4
            assert (REPORTED in metrics) == expected
            if expected:
                reported += 1
                absent += len(ends) < 4
                among = taken[index][-len(ends) - 1 :]
                wanted = by_hand(make_nodes()[index], among)
                assert metrics[REPORTED] == pytest.approx(wanted, rel=1e-9)
    assert reported > 4
    assert absent > 1


def test_fires_when_calm_and_keeps_the_statistics_of_that_round() -> None:
    strategy = Noting(freeze_round="auto", window=2, threshold=1e9, latest=1.0)
    late = Federation(make_model()).run(strategy, 5)
    # changes are known from the second participation on, so two of them after round 3
    assert strategy.state.frozen_after == 3
    metrics, measured = strategy.__dict__["notes"][2]
    largest = max(each[REPORTED] for each in metrics.values())
    assert measured == {"frozen-after": 3, "statistics-change-variance": largest}
    fixed = Federation(make_model()).run(FixBN(freeze_round=3), 5)
    assert distance(late, fixed) == 0


@pytest.mark.parametrize(("latest", "after"), [(0.5, 3), (0.3, 2), (0.01, 1)])
def test_freezes_at_the_latest_after_a_share_of_the_run(latest: float, after: int) -> None:
    strategy = FixBN(freeze_round="auto", threshold=0.0, latest=latest)
    found = Federation(make_model()).run(strategy, 6)
    assert strategy.state.frozen_after == after
    assert distance(found, Federation(make_model()).run(FixBN(freeze_round=after), 6)) == 0


@pytest.mark.parametrize(
    "make", [lambda after: FixBN(freeze_round=after), lambda after: FedTANII(m=after)]
)
def test_says_that_a_freeze_is_too_late(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    for after in (1, 2):
        caplog.clear()
        Federation(make_model()).run(make(after), 2)
        assert ("nothing is ever frozen" in caplog.text) == (after == 2)


def test_says_when_it_never_fires(caplog: pytest.LogCaptureFixture) -> None:
    Federation(make_model()).run(FixBN(freeze_round="auto", window=2, threshold=0.0, latest=1.0), 4)
    assert any("never fired in 4 rounds" in record.getMessage() for record in caplog.records)


def test_one_restless_client_is_enough_not_to_freeze() -> None:
    def variances(**options: Any) -> list[float]:
        strategy = Noting(freeze_round="auto", window=2, **options)
        Federation(make_model()).run(strategy, 4)
        return [metrics[REPORTED] for metrics in strategy.__dict__["notes"][2][0].values()]

    seen = sorted(variances(threshold=0.0, latest=1.0))
    assert len(seen) == len(SIZES)
    for threshold, frozen in (
        ((seen[-2] + seen[-1]) / 2, False),
        (seen[-1], False),
        (seen[-1] * 1.001, True),
    ):
        strategy = Noting(freeze_round="auto", window=2, threshold=threshold, latest=1.0)
        Federation(make_model()).run(strategy, 4)
        assert (strategy.state.frozen_after == 3) == frozen


def test_a_fraction_needs_the_number_of_rounds() -> None:
    strategy, nodes = FixBN(freeze_round=0.5), Federation(make_model())
    strategy.started = True
    with pytest.raises(ValueError, match=r"start\(num_rounds"):
        strategy.configure_train(1, nodes.initial, INSTRUCTION.to_config(), nodes.grid)
    config = INSTRUCTION.to_config()
    config["num-rounds"] = 4
    messages: list[Message] = strategy.configure_train(3, nodes.initial, config, nodes.grid)
    assert messages[0].content.config_records["config"]["fedbn.freeze"] == "statistics"


def test_a_client_that_could_not_freeze_is_known_before_the_freeze() -> None:
    strategy = FixBN(freeze_round=3)
    assert [strategy.instruct(Instruction(server_round=number)).later for number in (3, 4)] == [
        "freeze,omit",
        "",
    ]


FROZEN_RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "a twentieth from the freeze on": ({}, [0.1, 0.1, 0.005, 0.005, 0.005]),
    "another share": ({"frozen_lr": 0.5}, [0.1, 0.1, 0.05, 0.05, 0.05]),
    "no more learning": ({"frozen_lr": 0.0}, [0.1, 0.1, 0.0, 0.0, 0.0]),
    "no bound": ({"frozen_lr": 1.0}, [0.1] * 5),
    "lower where the schedule is": (
        {"lr_schedule": "0.5@3,0.01@4"},
        [0.1, 0.1, 0.005, 0.005, 0.0005],
    ),
    "lower than a schedule that divides by ten at the freeze": (
        {"lr_schedule": "0.1@2,0.1@4"},
        [0.1, 0.1, 0.005, 0.005, 0.001],
    ),
    "not lower than a schedule that is low enough": (
        {"lr_schedule": "0.01@2"},
        [0.1, 0.1, 0.001, 0.001, 0.001],
    ),
    "what the schedule says of the freeze": (
        {"lr_schedule": "=0.09@freeze,0.5@4"},
        [0.1, 0.1, 0.09, 0.09, 0.045],
    ),
    "a schedule that raises the rate at the freeze": (
        {"lr_schedule": "=0.3@freeze"},
        [0.1, 0.1, 0.3, 0.3, 0.3],
    ),
    "a cosine, lower than the bound at last": (
        {"lr_schedule": "warmup@1,cosine@1", "frozen_lr": 0.2},
        [0.1, 0.1, 0.02, 0.02, 0.1 * (1 + math.cos(0.75 * math.pi)) / 2],
    ),
    "a cosine from the freeze on": (
        {"lr_schedule": "=0.3@freeze,cosine@3"},
        [0.1, 0.1, 0.3, 0.3, 0.15],
    ),
    "statistics that move": ({"freeze": "affine"}, [0.1] * 5),
    "statistics and affine parameters that stand still": (
        {"freeze": "both"},
        [0.1, 0.1, 0.005, 0.005, 0.005],
    ),
}


@pytest.mark.parametrize("case", FROZEN_RATES)
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: FixBN(freeze_round=2, **options),
        lambda **o: FedTANII(m=2, **{"frozen_lr": 0.05, **o}),
    ],
)
def test_the_rate_under_frozen_statistics(case: str, make: Any) -> None:
    options, wanted = FROZEN_RATES[case]
    strategy = make(**options)
    strategy.num_rounds = 5
    rates = [
        strategy.instruct(Instruction(server_round=number, lr=0.1)).lr for number in range(1, 6)
    ]
    assert rates == pytest.approx(wanted)


def test_a_network_that_is_frozen_from_the_start_has_the_rate_as_given() -> None:
    made = (
        FixBN(freeze_round=0),
        FixBN(freeze_round=0, frozen_lr=0.5),
        FixBN(freeze_round=0, frozen_lr=0.2),
    )
    for strategy, rate in zip(made, (0.1, 0.05, 0.02), strict=True):
        rates = [
            strategy.instruct(Instruction(server_round=number, lr=0.1)).lr for number in (1, 2)
        ]
        assert rates == pytest.approx([rate, rate])


def test_a_loop_that_has_a_rate_of_its_own_gets_none_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = FixBN(freeze_round=2, frozen_lr=0.5)
    strategy.round = Round(has_rate=False)
    usual = Instruction().lr
    assert [strategy.instruct(Instruction(server_round=number)).lr for number in range(1, 5)] == [
        usual
    ] * 4
    assert ["has no `lr`" in message for message in caplog.messages] == [True]
