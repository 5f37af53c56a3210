"""The script that runs recipes and records rows: which runs there are, and that none of them is
made twice.
"""

import csv
import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.checkout import ROOT, run
from tests.helpers.runs import OPTIONS

RECIPE = {
    "options": {key: value for key, value in OPTIONS.items() if key != "partition"},
    "methods": {"BN": "fedavg", "GN": "fedavg+gn"},
    "vary": {"labels": {"skewed": {"partition": "classes:2"}}},
    "seeds": 2,
    # of the rates that can be tried, 10 is the largest
    "grid": {"lr": [0.003, 3.0]},
}


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with empty tables in a folder of its own."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("measure")
    for name in ("runs", "rates", "curves"):
        (tmp_path / f"{name}.csv").write_text(
            (ROOT / f"docs/measured/{name}.csv").read_text().splitlines()[0] + "\n"
        )
    monkeypatch.setattr(script, "TABLES", tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return script


def table(name: str) -> list[dict[str, str]]:
    with Path(f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_rows_are_of_seeds_that_chose_no_rate_and_what_has_one_is_not_run_again(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # the largest rate is always the best one, so the next one is tried
    monkeypatch.setattr(measure, "best_rate", max)
    measure.measure("tiny.yaml")
    runs, rates = table("runs"), table("rates")
    assert [(row["method"], row["seed"]) for row in runs] == [
        ("BN", "10"),
        ("GN", "10"),
        ("BN", "11"),
        ("GN", "11"),
    ]
    assert {(row["recipe"], row["setting"], row["learning rate"]) for row in runs} == {
        ("tiny", "skewed", "10")
    }
    assert {row["commit"] for row in runs} == {measure.commit()}
    assert run("git", "-c", "safe.directory=*", "rev-parse", "HEAD").startswith(measure.commit())
    tried = [
        (row["method"], row["seeds"], [rate for rate in ("0.003", "3", "10") if row[rate]])
        for row in rates
    ]
    assert tried == [
        (method, seed, new)
        for method in ("BN", "GN")
        for new in (["0.003", "3"], ["10"])
        for seed in ("0", "1")
    ]
    # two evaluations of three rounds: the second, and the last
    curve = [(row["round"], row["accuracy, %"]) for row in table("curves") if row["method"] == "GN"]
    assert [number for number, _ in curve] == ["2", "3", "2", "3"]
    assert [score for _, score in curve[1::2]] == [
        row["accuracy, %"] for row in runs if row["method"] == "GN"
    ]

    lines = Path("runs.csv").read_text().splitlines(keepends=True)
    Path("runs.csv").write_text("".join(lines[:-1]))
    shutil.rmtree("results")
    capsys.readouterr()
    measure.measure("tiny.yaml")
    assert table("runs") == runs
    assert table("rates") == rates
    assert capsys.readouterr().out.count("\n") == 1
