"""What the command `compare` concludes, and the tables in the terminal."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments.output.console import console, show_comparison
from tests.helpers.runs import run

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


def shown(seeds: int = 1, **more: Any) -> str:
    runs = [{**RUN, "method": method, "seed": seed, **more} for method in METHODS for seed in range(seeds)]
    with console.capture() as captured:
        show_comparison(runs, Path())
    return captured.get()


@pytest.mark.parametrize("seeds", [1, 3])
def test_names_and_numbers_are_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    monkeypatch.setattr(console, "width", 80)
    words = shown(seeds, **{"domain-accuracy": {"real": 0.5, "photos": 0.4}}).split()
    for part in ("fixbn", ":freeze-round=0.3", ":frozen-lr=0.05", "fedtan", ":carry=true", "centralized"):
        assert part in words
    # all differ by nothing, which has no sign but plus, and one seed has no spread
    assert words.count("+0.0") == len(METHODS) - 1
    assert ("±" in words) == (seeds > 1)
    # a megabyte has a million bytes
    assert words.count("1,400") == words.count("93.1") == words.count("119.6") == len(METHODS)


def test_a_value_that_was_chosen_is_shown_and_marked_at_the_edge() -> None:
    assert not {"lr", "chosen"} & set(shown().split())
    more: dict[str, Any] = {"chosen": {"lr": "0.1", "mu": "1"}, "chosen-at-edge": ["mu"]}
    words = shown(**more)
    assert words.count("lr=0.1, mu=1*") == len(METHODS)
    assert "* the least or the largest value of its grid" in words


def test_compare_finds_out_what_one_class_a_client_does(tmp_path: Path) -> None:
    """Of four classes of equal size, a client by itself knows one, so it is right a fourth of the time.

    With GN one model for all learns all classes. With BN it does not: each client has the statistics of its class.
    """
    options = {"partition": "classes:1", "clients": "4", "rounds": "10", "model": "mlp"}
    methods = "fedavg+gn,standalone+gn,fedavg"
    assert run("compare", "--methods", methods, "--seeds", "2", results_dir=str(tmp_path), **options) == 0
    accuracies: dict[str, list[float]] = {}
    for summary in json.loads((tmp_path / "compare.json").read_text()):
        accuracies.setdefault(summary["method"], []).append(summary["accuracy"])
    assert accuracies["standalone+gn"] == pytest.approx([0.25] * 2, abs=0.02)
    assert min(accuracies["fedavg+gn"]) > 0.7
    assert max(accuracies["fedavg"]) < 0.5
