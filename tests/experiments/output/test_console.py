"""The tables in the terminal."""

from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments.output.console import console, show_comparison

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
    assert words.count("1,400") == words.count("93.1") == len(METHODS)


def test_names_are_in_one_line_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 120)
    assert set(METHODS) < set(shown().split())


def test_a_megabyte_has_a_million_bytes() -> None:
    assert shown().split().count("119.6") == len(METHODS)


def test_a_value_that_was_chosen_is_shown_and_marked_at_the_edge() -> None:
    assert not {"lr", "chosen"} & set(shown().split())
    more: dict[str, Any] = {"chosen": {"lr": "0.1", "mu": "1"}, "chosen-at-edge": ["mu"]}
    words = shown(**more)
    assert words.count("lr=0.1, mu=1*") == len(METHODS)
    assert "* the least or the largest value of its grid" in words
