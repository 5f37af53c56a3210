"""Rules in place of the mean: by their definitions, beside Flower's strategies, and for statistics
of BN layers.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbn_flwr.server.pooling import Averager, Start
from fedbn_flwr.server.robust import RULES, Robust
from fedbn_flwr.strategies import FedAvg

Row = list[float]
#: one of every kind, with the fewest nodes that it needs
EXAMPLES = {"trimmed:0.2": 5, "median": 3, "multi-krum:2": 7, "norm:1.5": 3}
#: weights, which do not count under a rule
UNEQUAL = [2.0 ** (number % 4) for number in range(10)]


def draw(nodes: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return states of two floating-point entries in float64."""
    random = np.random.default_rng(seed)
    return [{"w": random.normal(size=(2, 3)), "b": random.normal(size=4)} for _ in range(nodes)]


# ---- the definitions, number by number -----------------------------------------------------------


def median(numbers: Sequence[float]) -> float:
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def trimmed(rows: list[Row], share: float) -> Row:
    cut = int(share * len(rows))
    kept = [sorted(column)[cut : len(rows) - cut] for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) for column in kept]


def squared_distance(one: Row, other: Row) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def krum(rows: list[Row], liars: int, selected: int) -> list[Row]:
    """Return the rows with the lowest scores."""

    def score(row: Row) -> float:
        return sum(
            sorted(squared_distance(row, other) for other in rows if other is not row)[
                : len(rows) - liars - 2
            ]
        )

    return sorted(rows, key=score)[:selected]


def mean(rows: list[Row]) -> Row:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def bounded(rows: list[Row], factor: float, start: Row) -> Row:
    lengths = [squared_distance(row, start) ** 0.5 for row in rows]
    largest = factor * median(lengths)
    moved = [
        [
            begin + min(1, largest / length) * (number - begin)
            for number, begin in zip(row, start, strict=True)
        ]
        for row, length in zip(rows, lengths, strict=True)
    ]
    return mean(moved)


DEFINITIONS: dict[str, Callable[[list[Row]], Row]] = {
    "trimmed:0.2": lambda rows: trimmed(rows, 0.2),
    "median": lambda rows: [median(column) for column in zip(*rows, strict=True)],
    "multi-krum:2": lambda rows: mean(krum(rows, 2, len(rows) - 2)),
}


@pytest.mark.parametrize("text", DEFINITIONS)
@pytest.mark.parametrize("nodes", [7, 10])
def test_a_model_is_what_the_definition_says(text: str, nodes: int) -> None:
    states = draw(nodes)
    states[2]["b"] += 1e6
    got = Robust.parse(text).average(states, UNEQUAL[: len(states)])
    flat = [[*state["w"].ravel().tolist(), *state["b"].tolist()] for state in states]
    assert [*got["w"].ravel(), *got["b"]] == pytest.approx(
        DEFINITIONS[text](flat), rel=1e-12, abs=1e-12
    )


def test_krum_scores_a_node_by_its_two_nearest_of_four_others() -> None:
    """K - F - 2 = 2, by hand: the squared distances are 1 + 9, 1 + 4, 0 + 4, 0 + 4 and 4 + 4, so
    the first goes.

    By one or three others, the last would go.
    """
    states = [{"w": np.array([position])} for position in (0.0, 1.0, 3.0, 3.0, 5.0)]
    assert Robust.parse("multi-krum:1").average(states, UNEQUAL[:5])["w"].tolist() == [
        (1 + 3 + 3 + 5) / 4
    ]


@pytest.mark.parametrize("nodes", [3, 4, 7])
def test_updates_are_bounded_array_by_array(nodes: int) -> None:
    states, current = draw(nodes), draw(1, seed=1)[0]
    states[0]["b"] *= -1e6
    start = Start(1, current, lambda _: (frozenset(), {}))
    got = Robust.parse("norm:1.5").average(states, UNEQUAL[:nodes], start)
    for name in ("w", "b"):
        rows = [state[name].ravel().tolist() for state in states]
        assert got[name].ravel() == pytest.approx(
            bounded(rows, 1.5, current[name].ravel().tolist()), rel=1e-12
        )


# ---- what holds of every rule --------------------------------------------------------------------


def test_every_rule_has_an_example() -> None:
    assert {text.partition(":")[0] for text in EXAMPLES} == set(RULES)


@pytest.mark.parametrize(("text", "fewest"), EXAMPLES.items())
def test_the_fewest_nodes_of_a_rule(text: str, fewest: int) -> None:
    assert Robust.parse(text).fewest_nodes == fewest


def test_of_a_trimmed_mean_one_node_at_each_end_must_go() -> None:
    for share in (0.01, 0.1, 0.2, 0.3, 0.34, 0.49):
        assert int(share * Robust.parse(f"trimmed:{share}").fewest_nodes) >= 1


@pytest.mark.parametrize("text", EXAMPLES)
def test_dtypes_stay_and_the_largest_counter_is_taken(text: str) -> None:
    counts = [3, 9, 4, 4, 5, 1, 2]
    states = [
        {"n": np.array(count), "w": np.full(2, count, np.float32), "h": np.ones(1, np.float16)}
        for count in counts
    ]
    got = Robust.parse(text).average(states, UNEQUAL[: len(states)])
    assert [array.dtype for array in got.values()] == [np.int64, np.float32, np.float16]
    assert list(got) == ["n", "w", "h"]
    assert got["n"].shape == ()
    assert got["n"] == {"multi-krum:2": 5}.get(text, 9)


# ---- statistics and gradients of a BN layer ------------------------------------------------------


def rows_of(nodes: int, seed: int = 0) -> Tensor:
    """Return means and variances of three channels."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(
        np.stack([random.normal(size=(nodes, 3)), random.exponential(size=(nodes, 3))], axis=1)
    )


@pytest.mark.parametrize("text", ["trimmed:0.2", "median", "norm:1.5"])
def test_statistics_are_the_rules_by_definition(text: str) -> None:
    rows = rows_of(6)

    def middle(values: Tensor) -> Row:
        columns = values.tolist()
        return (
            DEFINITIONS[text](columns)
            if text in DEFINITIONS
            else bounded(columns, 1.5, DEFINITIONS["median"](columns))
        )

    means, variances = rows.unbind(1)
    pooled = middle(means)
    around = variances + (means - torch.tensor(pooled, dtype=torch.float64)) ** 2
    got = Robust.parse(text).combine("statistics", rows, [])
    assert got[0].tolist() == pytest.approx(pooled, rel=1e-12)
    assert got[1].tolist() == pytest.approx(middle(around), rel=1e-12)
    assert Robust.parse(text).combine("gradients", rows, []).flatten().tolist() == pytest.approx(
        middle(rows.flatten(1)), rel=1e-12
    )


def test_krum_pools_the_nodes_that_it_selects() -> None:
    rows = rows_of(7)
    flat = rows.flatten(1).tolist()
    kept = krum(flat, 1, 6)
    expected = rows[torch.tensor([row in kept for row in flat])]
    mean = expected[:, 0].mean(0)
    variance = (expected[:, 1] + (expected[:, 0] - mean) ** 2).mean(0)
    torch.testing.assert_close(
        Robust.parse("multi-krum:1").combine("statistics", rows, []), torch.stack([mean, variance])
    )


@pytest.mark.parametrize("text", ["trimmed:0.2", "median", "norm:1.5"])
def test_two_exchanges_are_the_same_as_one(text: str) -> None:
    """The mean and then the variance around it, as the paper asks for them."""
    rows = rows_of(6)
    mean = Robust.parse(text).combine("mean", rows[:, 0], [])
    variance = Robust.parse(text).combine("variance", rows[:, 1] + (rows[:, 0] - mean) ** 2, [])
    torch.testing.assert_close(
        Robust.parse(text).combine("statistics", rows, []), torch.stack([mean, variance])
    )


@pytest.mark.parametrize("text", EXAMPLES)
@given(data=st.data())
@settings(max_examples=20)
def test_pooled_variances_are_never_negative(text: str, data: st.DataObject) -> None:
    numbers = st.floats(-1e6, 1e6, width=32)
    means = data.draw(st.lists(numbers, min_size=7, max_size=7))
    variances = data.draw(st.lists(numbers.map(abs), min_size=7, max_size=7))
    rows = torch.tensor([means, variances]).T.unsqueeze(-1)
    got = Robust.parse(text).combine("statistics", rows, [])
    assert got.dtype == torch.float32
    assert got[1].item() >= 0


@pytest.mark.parametrize("text", EXAMPLES)
def test_corrections_to_a_rules_pool_are_nothing_under_the_rule(text: str) -> None:
    """Moved, and of the other sign: so what carried corrections add is nothing if all nodes
    reply.
    """
    rows = rows_of(7)
    pool = Robust.parse(text).combine
    left = pool("gradients", pool("gradients", rows, []) - rows, [])
    torch.testing.assert_close(left, torch.zeros(2, 3, dtype=torch.float64), rtol=0, atol=1e-15)


# ---- how rules are written -----------------------------------------------------------------------


def test_no_rule() -> None:
    assert type(FedAvg(robust="none").averager) is Averager


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("mean", "unknown robust rule 'mean'; known: none, trimmed, median, multi-krum, norm"),
        ("", "unknown robust rule ''; known: none, trimmed, median, multi-krum, norm"),
        ("median:1", "robust=median takes no number, got 'median:1'"),
        (
            "trimmed",
            "robust=trimmed:NUMBER needs the share of nodes to leave out at each end, above 0 and "
            "below 0.5",
        ),
        ("trimmed:0.5", "above 0 and below 0.5, got 'trimmed:0.5'"),
        ("multi-krum:0", "needs the number of lying nodes, at least 1, got 'multi-krum:0'"),
        ("multi-krum:1.5", "needs the number of lying nodes, at least 1, got 'multi-krum:1.5'"),
        ("multi-krum:many", "needs the number of lying nodes, at least 1, got 'multi-krum:many'"),
        (
            "norm:-1",
            "needs the largest update, in multiples of the median node's, above 0, got 'norm:-1'",
        ),
        ("norm:nan", "got 'norm:nan'"),
        ("norm:inf", "got 'norm:inf'"),
    ],
)
def test_what_is_no_rule_is_an_error(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        Robust.parse(text)
