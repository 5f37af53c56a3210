"""Tables: means and paired differences by hand, and what a terminal and a file show."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.console import console
from tests.helpers.matrix_files import write_comparison

Summary = dict[str, Any]
METHODS = ("fedavg", "fixbn:freeze-round=0.3:frozen-lr=0.05", "fedtan:carry=true", "centralized")
RUN: Summary = {
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


def ended(method: str, seed: int = 0, **summary: Any) -> Summary:
    return {**RUN, "method": method, "seed": seed, **summary}


def scored(**accuracies: Sequence[float | None]) -> list[Summary]:
    """Runs of methods with the seeds of their accuracies; with None a seed was not run."""
    return [
        ended(method, seed, accuracy=accuracy)
        for method, numbers in accuracies.items()
        for seed, accuracy in enumerate(numbers)
        if accuracy is not None
    ]


def failed(method: str, seed: int = 0, **summary: Any) -> Summary:
    return {"method": method, "seed": seed, "failed": "the loss is nan", **summary}


def runs(
    seeds: int = 1, methods: Sequence[str] = METHODS, more: Summary | None = None
) -> list[Summary]:
    more = more or {}
    return [ended(method, seed, **more) for method in methods for seed in range(seeds)]


def shown(folder: Path, summaries: Sequence[Summary]) -> str:
    """What `results` prints of a comparison of these runs."""
    with console.capture() as captured:
        assert main(["results", str(write_comparison(folder, summaries))]) == 0
    return captured.get()


def numbers(folder: Path, summaries: Sequence[Summary]) -> dict[str, dict[str, str]]:
    """By method, the line of a comparison in `results.csv`."""
    assert main(["report", str(write_comparison(folder, summaries)), "--format", "csv"]) == 0
    lines = csv.DictReader((folder / "report/results.csv").read_text().splitlines())
    return {line["method"]: line for line in lines}


def test_means_and_paired_differences_by_hand(tmp_path: Path) -> None:
    found = numbers(tmp_path, scored(a=(0.5, 0.6, 0.7), b=(0.6, 0.8, 0.75), c=(0.5,)))
    first, second, third = found["a"], found["b"], found["c"]
    assert (float(first["accuracy, %"]), float(first["accuracy, % ±"])) == pytest.approx((60, 10))
    assert (first["vs a"], first["runs"], third["runs"]) == ("", "3", "1")
    # the differences are 10, 20 and 5: mean 35 / 3, variance (2.78 + 69.44 + 44.44) / 2
    assert float(second["vs a"]) == pytest.approx(35 / 3)
    # Student's t for 95 % and two degrees of freedom is 4.302653
    assert float(second["vs a ±"]) == pytest.approx(4.302653 * (116.667 / 2 / 3) ** 0.5, rel=1e-5)
    assert (float(third["accuracy, %"]), third["accuracy, % ±"], third["vs a ±"]) == (
        50,
        "",
        "",
    )


def test_pairs_are_of_equal_seeds_whichever_is_missing(tmp_path: Path) -> None:
    second = numbers(tmp_path, scored(a=(0.5, None, 0.7), b=(0.6, 0.6, 0.9)))["b"]
    assert float(second["accuracy, %"]) == pytest.approx(70)
    assert float(second["vs a"]) == pytest.approx(((60 - 50) + (90 - 70)) / 2)


def test_one_pair_is_said_however_many_runs_the_first_method_has(tmp_path: Path) -> None:
    assert "One seed" in shown(tmp_path / "one", scored(a=(0.5, 0.6, 0.7), b=(0.6,)))
    assert "One seed" not in shown(tmp_path / "two", scored(a=(0.5, 0.6, 0.7), b=(0.6, 0.7)))


def test_what_a_run_has_not_measured_is_no_number(tmp_path: Path) -> None:
    """Files have null for what is not finite; a run that failed has measured nothing."""
    found = numbers(
        tmp_path,
        [ended("a", loss=float("nan")), ended("b", accuracy=None), failed("c", accuracy=0.5)],
    )
    assert [line["accuracy, %"][:12] for line in found.values()] == [
        "93.100000000",
        "not recorded",
        "failed",
    ]
    assert not any("loss" in name for name in found["a"])


@pytest.mark.parametrize(("seeds", "width"), [(1, 80), (3, 80), (1, 30)])
def test_names_and_numbers_are_whole_in_80_columns_and_fewer(
    monkeypatch: pytest.MonkeyPatch, seeds: int, width: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(console, "width", width)
    words = shown(
        tmp_path, runs(seeds, more={"domain-accuracy": {"real": 0.5, "photos": 0.4}})
    ).split()
    for part in (
        "fixbn",
        ":freeze-round=0.3",
        ":frozen-lr=0.05",
        "fedtan",
        ":carry=true",
        "centralized",
    ):
        assert part in words
    # all differ by nothing, which has no sign but plus, and one seed has no spread
    assert words.count("+0.0") == len(METHODS) - 1
    assert ("±" in words) == (seeds > 1)
    # a megabyte has a million bytes
    assert words.count("1,400") == words.count("93.1") == words.count("119.6") == len(METHODS)
    # the mean of 50 and 40, once for each method
    assert words.count("45.0") == len(METHODS)
    assert ("`--seeds 3` gives intervals." in " ".join(words)) == (seeds == 1)


def test_a_title_is_of_the_clients_data(tmp_path: Path) -> None:
    """The centralized reference has a partition of its own, which counts if it is alone.

    Rounds are as asked for.
    """
    union, stopped = (
        ended("centralized", partition="union"),
        {**ended("fedavg"), "stopped-after": 3},
    )
    assert "digits, small-cnn, classes:2, 200 rounds" in shown(tmp_path / "both", [union, stopped])
    assert "digits, small-cnn, union, 200 rounds" in shown(tmp_path / "one", [union])


def test_a_value_that_was_chosen_is_shown_and_marked_at_the_edge(tmp_path: Path) -> None:
    assert not {"lr", "chosen"} & set(shown(tmp_path / "none", runs()).split())
    words = shown(
        tmp_path / "all", runs(more={"chosen": {"lr": "0.1", "mu": "1"}, "chosen-at-edge": ["mu"]})
    )
    assert words.count("lr=0.1, mu=1*") == len(METHODS)
    assert "* the least or the largest value of its grid" in words
    assert " lr " in shown(tmp_path / "differs", [ended("fedavg"), ended("fixbn", lr=0.3)])


def test_a_method_of_which_a_run_failed_has_words_in_place_of_its_numbers(tmp_path: Path) -> None:
    summaries = [*runs(2, METHODS[:2]), ended("fedbn"), failed("fedbn", 1, diverged=7)]
    words = shown(tmp_path / "shown", summaries)
    assert "diverged at round 7" in words
    assert "fedbn, seed 1: the loss is nan" in words
    line = numbers(tmp_path / "file", summaries)["fedbn"]
    assert (line["accuracy, %"], line["vs fedavg"], line["runs"]) == (
        "diverged at round 7",
        "",
        "1",
    )


def test_what_readers_should_know_of_the_data(tmp_path: Path) -> None:
    about: Summary = {"absent-classes": ["4", "9"], "left-out": {"7": 2}}
    text = shown(tmp_path, [ended("a", **about), ended("b")])
    assert (
        "Caution: no client has samples of some classes: 4, 9 (classes:2 with 5 clients)." in text
    )
    assert "Caution: nodes missing in rounds: 1; rounds.jsonl names them." in text
    text = shown(
        tmp_path / "sites", [ended("a", **about, clients=3, sites={"north": {}, "west": {}})]
    )
    assert "Caution: scores are means over north, west, 2 of 3 sites." in text
    assert "Caution: scores" not in shown(
        tmp_path / "all", [ended("a", clients=1, sites={"north": {}})]
    )


def test_domains_that_nobody_trained_with_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means are over domains first, of each seed; intervals are over seeds."""
    monkeypatch.setattr(console, "width", 120)
    scores: dict[str, dict[str, tuple[float | None, ...]]] = {
        "a": {"x": (0.4, 0.5), "y": (0.6, 0.9), "z": (0.8, 1.0)},
        "b": {"x": (0.1, 0.2), "y": (0.3, 0.4), "z": (0.5, None)},
    }
    text = shown(
        tmp_path,
        [
            ended(
                f"{method}:unseen={domain}:mu=1",
                seed,
                unseen=domain,
                accuracy=score,
                **{"accuracy-adapted-20": 0.4 + seed / 10},
            )
            if score
            else failed(f"{method}:unseen={domain}:mu=1", seed, diverged=3)
            for method, of_method in scores.items()
            for domain, numbers in of_method.items()
            for seed, score in enumerate(numbers)
        ],
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    # of two numbers, Student's t is 12.7062, and half the interval is that times half their
    # distance
    for line in (
        "x a:mu=1 45.0 ± 63.5 90.0 ± 0.0 45.0 ± 63.5 51.0",
        "y a:mu=1 75.0 ± 190.6 90.0 ± 0.0 45.0 ± 63.5 51.0",
        "x b:mu=1 15.0 ± 63.5 90.0 ± 0.0 45.0 ± 63.5 51.0",
        "z a:mu=1 90.0 ± 127.1 90.0 ± 0.0 45.0 ± 63.5 51.0",
        "z b:mu=1 diverged at round 3 51.0",
        # (40 + 60 + 80) / 3 and (50 + 90 + 100) / 3
        "mean a:mu=1 70.0 ± 127.1 90.0 ± 0.0 45.0 ± 63.5 51.0",
        "mean b:mu=1 diverged at round 3 51.0",
    ):
        _, _, rest = line.partition(" ")
        assert line in lines or rest in lines, (line, lines)
    adapted: list[Summary] = [
        {"unseen": "x", "accuracy-adapted-20": 0.4},
        {"unseen": "y", "accuracy-adapted-20": None},
    ]
    lacking = [ended("a", **own) for own in adapted]
    rows = map(str.split, shown(tmp_path / "lack", lacking).splitlines())
    assert ["mean", "a", "93.1", "90.0", "51.0"] in [*rows]
    (alone,) = [
        line
        for line in shown(tmp_path / "one", [ended("a", unseen="x")]).splitlines()
        if "93.1" in line
    ]
    assert alone.split()[:2] == ["x", "a"]


@pytest.mark.parametrize(("score", "digits"), [("mean-iou", "40.0"), ("mse", "0.4000")])
def test_every_form_is_of_the_score_by_which_methods_are_compared(
    score: str, digits: str, tmp_path: Path
) -> None:
    forms: Summary = {f"{score}-personal": 0.4, f"{score}-mean-bn": 0.4}
    domains = {f"domain-{score}": {"real": 0.4, "photos": 0.4}}
    one = ended("a", **{"metric": score, score: 0.3, **forms, **domains})
    words = shown(tmp_path / "compared", [one]).split()
    # personal, mean BN, both domains and their mean
    assert words.count(digits) == 5
    assert f"{score.replace('-iou', ' IoU')} by domain" in " ".join(words)
    (line,) = numbers(tmp_path / "written", [one]).values()
    unit = "" if score == "mse" else ", %"
    assert {"real" + unit, "photos" + unit, "Average" + unit} <= line.keys()
    adapted = {f"{score}-adapted-20": 0.4, f"{score}-adapted-all": 0.4}
    one = ended("a", **{"metric": score, score: 0.3, "unseen": "x", **forms, **adapted})
    assert shown(tmp_path / "unseen", [one]).split().count(digits) == 3


def test_domains_without_a_finite_score_are_empty(tmp_path: Path) -> None:
    lost: Summary = {"domain-accuracy": {"real": None, "photos": None}}
    found: Summary = {"domain-accuracy": {"real": 0.25, "photos": None}}
    rows = map(str.split, shown(tmp_path, [ended("a", **lost), ended("b", **found)]).splitlines())
    assert ["b", "25.0", "25.0"] in [*rows]
    assert "by domain" not in shown(tmp_path / "lost", [ended("a", **lost)])


def test_less_of_an_error_is_no_share(tmp_path: Path) -> None:
    """An error that is compared by has its own unit, no percent, and digits enough to be small."""
    words = shown(
        tmp_path, [ended(name, metric="mse", mse=value) for name, value in (("a", 2.5), ("b", 2.0))]
    ).split()
    assert [word for word in words if word in ("2.5000", "2.0000", "-0.5000")] == [
        "2.5000",
        "2.0000",
        "-0.5000",
    ]
