"""The table beside the paper's numbers: means, the order of methods, and directions."""

from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.console import console
from tests.helpers.matrix_files import write_comparison

CONTENT: dict[str, Any] = {
    "place": "Table 1",
    "about": "two by [two]",
    "methods": {"BN": "fedavg", "GN": "fedavg+gn", "LN": "fedavg+ln"},
    "vary": {
        "partition": {"IID": "iid", "Shards": "classes:2"},
        "local-steps": {"E=1": 1, "E=9": 9},
    },
    "reported": [
        {
            "place": "page 7",
            "values": {
                "BN": {"IID, E=1": "90.10 ± 0.40", "Shards, E=1": 40},
                "GN": {"IID, E=1": "91.50 ± 1.50", "Shards, E=1": 80},
                "LN": {"Shards, E=1": "80.900"},
            },
        }
    ],
    "directions": [
        {"claim": "GN > BN", "in": "E=1", "place": "page 2"},
        {"claim": "BN @ E=9 > BN @ E=1"},
        {"claim": "LN > BN", "in": "E=9"},
        {"claim": "GN > BN", "in": "E=9", "column": "train-loss"},
        {"claim": "GN > BN", "column": "accuracy", "place": "page 3"},
    ],
    "notes": ["the paper has [three] runs"],
}


ACCURACIES = {
    ("IID, E=1", "BN"): (0.9, 0.8),
    ("IID, E=1", "GN"): (0.8, 0.8),
    ("IID, E=1", "LN"): (),
    ("Shards, E=1", "BN"): (0.5,),
    ("Shards, E=1", "GN"): (0.6,),
    ("Shards, E=1", "LN"): (0.45,),
    ("IID, E=9", "BN"): (0.95,),
    ("Shards, E=9", "BN"): (0.7,),
    ("Shards, E=9", "GN"): (None,),
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    ended = [
        {"setting": setting, "labels": dict(zip(CONTENT["vary"], setting.split(", "), strict=True))}
        | {"label": label, "method": CONTENT["methods"][label], "seed": seed}
        | ({"failed": "the loss is not finite"} if accuracy is None else {"accuracy": accuracy})
        for (setting, label), accuracies in ACCURACIES.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    with console.capture() as captured:
        assert main(["results", str(write_comparison(tmp_path, ended, CONTENT))]) == 0
    return captured.get()


def row(text: str, *words: str) -> str:
    (line,) = [
        line
        for line in text.splitlines()
        if all(word in line for word in words) and ":" not in line
    ]
    return " ".join(line.split())


def test_numbers_stand_beside_those_of_the_paper(text: str) -> None:
    # (90 + 80) / 2, and the standard deviation of two numbers: 10 / sqrt 2
    assert row(text, "BN", "90.10") == "IID, E=1 BN 85.00 ± 7.07 90.10 ± 0.40"
    # as many digits as printed
    assert row(text, "LN", "45.000") == "LN 45.000 80.900"


def test_a_failed_cell_says_why(text: str) -> None:
    assert row(text, "GN", "failed") == "GN failed"
    assert "Failed: GN | Shards, E=9: the loss is not finite" in text


def test_only_pairs_count_that_the_paper_tells_apart(text: str) -> None:
    """Those of IID overlap, GN and LN differ by 0.9; BN < GN is as here, BN < LN is not."""
    assert "Order: 1 of 2 pairs of methods are as in page 7." in text
    assert (
        "not: BN < LN in Shards, E=1, accuracy: printed 40.0 and 80.9, here 50.00 and 45.00" in text
    )


def test_directions(text: str) -> None:
    assert (
        "GN > BN in E=1 (page 2): does not agree in 1 of 2 settings: 80.00 ± 0.00 and 85.00 ± "
        "7.07 in IID, E=1" in text
    )
    # IID with IID and Shards with Shards, but never one with the other
    assert "BN @ E=9 > BN @ E=1: agrees: 95.00 and 85.00 ± 7.07 in IID, E=9, ..." in text
    assert "LN > BN in E=9: not run" in text
    # a claim that is not about accuracies says what it is about
    assert "GN > BN in E=9, train-loss: not run" in text
    assert "GN > BN (page 3): does not agree" in text
    # words in brackets are no markup
    assert "Note: the paper has [three] runs" in text
    assert "mine: two by [two] (Table 1)" in text
