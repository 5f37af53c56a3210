"""The mean of the entries that stay on the nodes: the mean over the nodes that have just learned
them, as in FedBS.
"""

from typing import Any

import pytest
import torch

from fedbn_flwr import state
from fedbn_flwr.strategies import FedAvg, FedBN, Pooled, SiloBN
from tests.helpers.harness import Federation, make_model, participants
from tests.helpers.references import State, weighted_mean

#: ten clients, unequal on purpose
SIZES = (7, 12, 20, 5, 9, 16, 8, 11, 6, 14)


def mean(strategy: FedBN) -> State:
    return {name: torch.from_numpy(value) for name, value in strategy.state.personal.items()}


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_is_the_mean_over_the_last_rounds_participants(weighting: Any, rounds: int) -> None:
    nodes = Federation(make_model(), SIZES)
    strategy = FedBN(mean_personal=True, fraction_train=0.2, weighting=weighting)
    drawn = participants(strategy)
    nodes.run(strategy, rounds)
    last = drawn[-1]
    assert len(last) == 2
    assert len({SIZES[partition] for partition in last}) == 2
    sizes = [float(SIZES[partition]) for partition in last]
    expected = weighted_mean(
        list(map(nodes.kept, last)), sizes if weighting == "examples" else [1.0] * 2
    )
    found = mean(strategy)
    assert found.keys() == expected.keys()
    assert all(
        torch.allclose(found[name].double(), expected[name].double(), atol=1e-12) for name in found
    )


def test_a_round_without_a_reply_keeps_the_participants_of_the_one_before() -> None:
    strategy = FedBN(mean_personal=True, fraction_train=0.2)
    Federation(make_model(), SIZES).run(strategy, 1)
    before = mean(strategy)
    strategy.aggregate_train(2, [])
    after = mean(strategy)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_newcomer_starts_from_the_mean() -> None:
    class Noting(SiloBN):
        def update(self, pooled: Pooled) -> Any:
            merged = super().update(pooled)
            means.append(
                (merged["net.1.running_mean"], self.state.personal.get("net.1.running_mean"))
            )
            return merged

    means: list[Any] = []
    Federation(make_model(), SIZES).run(
        Noting(mean_personal=True, fraction_train=0.2), 3, evaluate_every=1
    )
    # no node has evaluated yet when the first round is merged
    assert means[0][1] is None
    assert not means[0][0].any()
    assert all((start == known).all() and known.any() for start, known in means[1:])


@pytest.mark.parametrize(("strategy", "group"), [(FedBN, "bn"), (SiloBN, "statistics")])
def test_entries_of_the_result_that_nobody_trained_are_named(
    strategy: type[FedBN], group: str, flower_log: pytest.LogCaptureFixture
) -> None:
    """Not where all is shared, or the nodes' mean is in its place."""
    model = make_model()
    for silent in (strategy(mean_personal=True), FedAvg()):
        Federation(model).run(silent, 2)
    assert "were not trained" not in flower_log.text
    Federation(model).run(strategy(), 2)
    (warning,) = {
        line.getMessage() for line in flower_log.records if "were not trained" in line.getMessage()
    }
    stay = state.group_keys(model, group)
    first = [name for name in model.state_dict() if name in stay][:3]
    assert f"({', '.join(first)}, ...)" in warning
    assert f"has {len(stay)} entries" in warning
