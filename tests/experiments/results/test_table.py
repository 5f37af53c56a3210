"""Tables of rows: means and paired differences by hand, and what a terminal, a page and a notebook show."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.experiments.results.rows import Row, frame_of, row_of, typical
from fedbn_flwr.experiments.results.show import FORMS, show, show_comparison
from fedbn_flwr.experiments.results.table import COLUMNS, UNSEEN, Cell, table, unseen_rows
from fedbn_flwr.experiments.results.values import compared, values_of

# ---- values ----------------------------------------------------------------------------------------------------------


def test_means_and_paired_differences_by_hand() -> None:
    values = compared({"a": {0: 0.5, 1: 0.6, 2: 0.7}, "b": {0: 0.6, 1: 0.8, 2: 0.75}})
    first, second = values["a"], values["b"]
    assert first.method == "a"
    assert (first.mean, first.deviation) == pytest.approx((0.6, 0.1))
    assert first.number == 3
    assert (first.difference, first.half_width) == (0.0, 0.0)
    # the differences are 0.1, 0.2 and 0.05: mean 0.35 / 3, variance (0.000278 + 0.006944 + 0.004444) / 2
    assert second.difference == pytest.approx(0.35 / 3)
    # Student's t for 95 % and two degrees of freedom is 4.302653
    assert second.half_width == pytest.approx(4.302653 * (0.0116667 / 2 / 3) ** 0.5, rel=1e-5)
    (alone,) = compared({"a": {0: 0.5}}).values()
    assert (alone.mean, alone.deviation, alone.half_width) == (0.5, 0.0, 0.0)


def test_pairs_are_of_equal_seeds_whatever_the_order_and_whichever_is_missing() -> None:
    second = compared({"a": {0: 0.5, 2: 0.7}, "b": {2: 0.9, 1: 0.6, 0: 0.6}})["b"]
    assert second.mean == pytest.approx(0.7)
    assert second.difference == pytest.approx(((0.6 - 0.5) + (0.9 - 0.7)) / 2)


def test_what_a_run_has_not_measured_is_no_number() -> None:
    """Files have null for what is not finite; a run that failed has measured nothing."""
    rows = [ended("a", accuracy=0.5, loss=float("nan")), ended("b", accuracy=None), ended("c", error="it failed")]
    assert [*values_of(rows)] == [("", "a", "accuracy")]


def test_a_run_of_the_clients_is_typical_if_there_is_one() -> None:
    centralized, first, second = {"partition": "union"}, {"partition": "classes:1"}, {"partition": "classes:2"}
    assert typical([centralized, first, second]) is first
    assert typical([centralized]) is centralized


# ---- tables ----------------------------------------------------------------------------------------------------------

METHODS = ("fedavg", "fixbn:freeze-round=0.3:frozen-lr=0.05", "fedtan:carry=true", "centralized")
RUN: dict[str, Any] = {
    "dataset": "digits",
    "model": "small-cnn",
    "partition": "classes:2",
    "clients": 5,
    "rounds": 200,
    "lr": 0.1,
    "accuracy": 0.931,
    "accuracy-personal": 0.99,
    "accuracy-mean-bn": 0.9,
    "seconds": 51.0,
    "exchanges": 1400,
    "payload-bytes": 119_552_000,
}


def ended(method: str, seed: int = 0, **summary: Any) -> Row:
    return row_of(Path(method), summary, label=method, method=method, seed=seed)


def runs(seeds: int = 1, methods: Sequence[str] = METHODS, more: Row = MappingProxyType({})) -> list[Row]:
    return [ended(method, seed, **RUN, **more) for method in methods for seed in range(seeds)]


def shown(rows: Sequence[Row]) -> str:
    with console.capture() as captured:
        show_comparison(rows)
    return captured.get()


@pytest.mark.parametrize("seeds", [1, 3])
def test_names_and_numbers_are_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    monkeypatch.setattr(console, "width", 80)
    words = shown(runs(seeds, more={"domain-accuracy": {"real": 0.5, "photos": 0.4}})).split()
    for part in ("fixbn", ":freeze-round=0.3", ":frozen-lr=0.05", "fedtan", ":carry=true", "centralized"):
        assert part in words
    # all differ by nothing, which has no sign but plus, and one seed has no spread
    assert words.count("+0.0") == len(METHODS) - 1
    assert ("±" in words) == (seeds > 1)
    # a megabyte has a million bytes
    assert words.count("1,400") == words.count("93.1") == words.count("119.6") == len(METHODS)
    # the mean of 50 and 40, once for each method
    assert words.count("45.0") == len(METHODS)
    assert ("`--seeds 3` gives intervals." in " ".join(words)) == (seeds == 1)


def test_a_value_that_was_chosen_is_shown_and_marked_at_the_edge() -> None:
    assert not {"lr", "chosen"} & set(shown(runs()).split())
    words = shown(runs(more={"chosen": {"lr": "0.1", "mu": "1"}, "chosen-at-edge": ["mu"]}))
    assert words.count("lr=0.1, mu=1*") == len(METHODS)
    assert "* the least or the largest value of its grid" in words
    assert " lr " in shown([*runs(methods=["fedavg"]), ended("fixbn", **{**RUN, "lr": 0.3})])


def test_a_method_of_which_a_run_failed_has_words_in_place_of_its_numbers() -> None:
    rows = [*runs(2, METHODS[:2]), ended("fedbn", **RUN), ended("fedbn", 1, error="the loss is nan", diverged=7)]
    words = shown(rows)
    assert "diverged at round 7" in words
    assert "fedbn, seed 1: the loss is nan" in words
    (line,) = [line for line in table(rows).lines if line["method"].text == "fedbn"]
    assert line["accuracy, %"] == Cell("diverged at round 7")
    assert line["difference"] == Cell()


def test_domains_that_nobody_trained_with_by_hand() -> None:
    """Means are over domains first, of each seed; intervals are over seeds."""
    scores: dict[str, dict[str, tuple[float | None, ...]]] = {
        "a": {"x": (0.4, 0.5), "y": (0.6, 0.9), "z": (0.8, 1.0)},
        "b": {"x": (0.1, 0.2), "y": (0.3, 0.4), "z": (0.5, None)},
    }
    rows = [
        ended(f"{method}:unseen={domain}:mu=1", seed, **{**RUN, "accuracy": score, "accuracy-adapted-20": 0.5})
        if score
        else ended(f"{method}:unseen={domain}:mu=1", seed, error="it diverged", diverged=3)
        for method, of_method in scores.items()
        for domain, numbers in of_method.items()
        for seed, score in enumerate(numbers)
    ]
    lines = table(unseen_rows(rows), UNSEEN, digits=1).lines
    shown = {(line["setting"].text, line["method"].text): line["as it is"].text for line in lines}
    # of two numbers, Student's t is 12.7062, and half the interval is that times half their distance
    assert shown == {
        ("x", "a:mu=1"): "45.0 ± 63.5",
        ("y", "a:mu=1"): "75.0 ± 190.6",
        ("x", "b:mu=1"): "15.0 ± 63.5",
        ("y", "b:mu=1"): "35.0 ± 63.5",
        ("z", "a:mu=1"): "90.0 ± 127.1",
        ("z", "b:mu=1"): "diverged at round 3",
        # (40 + 60 + 80) / 3 and (50 + 90 + 100) / 3
        ("mean", "a:mu=1"): "70.0 ± 127.1",
        ("mean", "b:mu=1"): "diverged at round 3",
    }
    assert lines[0]["adapted 20"].text == "50.0 ± 0.0"
    (alone,) = unseen_rows([ended("a", unseen="x", **RUN)])
    assert (alone["setting"], alone["label"]) == ("x", "a")


def test_a_data_frame_has_the_same_table() -> None:
    """Also where some rows lack a column, and numbers have become real ones."""
    rows = [*runs(2, more={"chosen": {"lr": 0.1}}), ended("fedbn", error="it diverged", diverged=3)]
    assert table(frame_of(rows)) == table(rows)
    assert table(frame_of(rows)[lambda frame: frame["seed"] == 0]) == table([row for row in rows if row["seed"] == 0])


def test_less_of_an_error_is_no_share() -> None:
    """An error that is compared by has its own unit, no percent, and digits enough to be small."""
    rows = [ended(name, **{**RUN, "metric": "mse", "mse": value}) for name, value in (("a", 2.5), ("b", 2.0))]
    assert table(rows).column("mse")[0].text == "2.5000"
    assert [cell.text for cell in table(rows).column("difference")] == ["baseline", "-0.5000"]


def test_a_column_and_a_form_are_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed to add them: one entry, which every other place takes up."""
    monkeypatch.setitem(COLUMNS, "clients", lambda entry: {"clients": entry.mean("clients")})
    monkeypatch.setitem(FORMS, "markdown", lambda table: f"| {' | '.join(table.headings)} |")
    assert show(table(runs(), ("method", "clients")), "markdown") == "| method | clients |"
