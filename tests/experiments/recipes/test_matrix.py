"""Runs of a matrix: what is written, what is taken up again, what fails alone, and what a kill leaves."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.results.values import columns_of
from tests.helpers.runs import OPTIONS

MATRIX: dict[str, Any] = {
    "about": "a matrix of one's own",
    "options": {key: value for key, value in OPTIONS.items() if key not in ("partition", "local-steps")},
    "methods": ["fedavg", "fixbn"],
    "vary": {"partition": {"IID": "iid", "skewed": "classes:2"}, "local-steps": [1, 2]},
}


def reproduce(folder: Path, content: object, *words: str) -> int:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return main(["reproduce", str(path), "--results-dir", str(folder / "out"), "--device", "cpu", *words])


def runs(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    rows = json.loads((folder / "out/results.json").read_text())
    return {(", ".join(row["labels"].values()), row["label"]): row["runs"] for row in rows}


def test_a_matrix_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(tmp_path, MATRIX, "--seeds", "2", "--only", "skewed") == 0
    done = runs(tmp_path)
    # 1 of 2 partitions x 2 numbers of local steps x 2 methods
    assert len(done) == 4
    assert [run["seed"] for run in done["skewed, local-steps=2", "fixbn"]] == [0, 1]
    assert done["skewed, local-steps=1", "fedavg"][0]["partition"] == "classes:2"
    # what `fedbn-flwr compare` and `fedbn-flwr run` write
    setting = tmp_path / "out/skewed__local-steps=2"
    assert {path.name for path in setting.iterdir()} == {
        "compare.json",
        "compare.png",
        *(f"{method}-seed{seed}" for method in ("fedavg", "fixbn") for seed in (0, 1)),
    }
    options = json.loads((setting / "fixbn-seed1/config.json").read_text())["options"]
    assert (options["local-steps"], options["partition"], options["seed"]) == (2, "classes:2", 1)
    table = (tmp_path / "out/table.txt").read_text()
    assert table in capsys.readouterr().out
    assert table.count("fixbn") == 2


def test_finished_runs_are_taken_up_unless_their_options_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(tmp_path, MATRIX, "--only", "IID", "--only", "fedavg") == 0
    first = runs(tmp_path)
    assert set(first) == {("IID, local-steps=1", "fedavg"), ("IID, local-steps=2", "fedavg")}
    changed = {**MATRIX, "vary": {**MATRIX["vary"], "local-steps": {"local-steps=1": 1, "local-steps=2": 3}}}
    capsys.readouterr()
    assert reproduce(tmp_path, changed) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("holds another run: its local-steps is 2, not 3 (--overwrite replaces it)")
    assert runs(tmp_path) == first
    assert reproduce(tmp_path, changed, "--overwrite") == 0
    second = runs(tmp_path)
    assert len(second) == 8
    # with the time that they took then
    assert second["IID, local-steps=1", "fedavg"] == first["IID, local-steps=1", "fedavg"]
    assert second["IID, local-steps=2", "fedavg"] != first["IID, local-steps=2", "fedavg"]


def test_a_matrix_of_which_nothing_trains_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(tmp_path, {**MATRIX, "vary": {"partition": ["classes:9"]}}) == 1
    assert "no cell could train" in capsys.readouterr().err


def test_a_data_set_that_is_not_here_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {**MATRIX, "options": {**MATRIX["options"], "dataset": "folder:/nowhere"}, "smoke": {"seeds": 1}}
    assert reproduce(tmp_path, content) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedbn-flwr: recipe mine needs the data set 'folder:/nowhere' (--smoke runs it in small")


def test_values_are_chosen_for_each_setting(tmp_path: Path) -> None:
    content = {**MATRIX, "methods": ["fedavg"], "vary": {"partition": ["iid"]}, "seeds": 1, "grid": {"lr": [0.0, 0.1]}}
    assert reproduce(tmp_path, content) == 0
    ((run,),) = runs(tmp_path).values()
    # a rate of 0 learns nothing
    assert (run["lr"], run["chosen-at-edge"], set(run["grid"])) == (0.1, ["lr"], {"lr=0.0", "lr=0.1"})
    table = (tmp_path / "out/table.txt").read_text()
    assert "lr=0.1*" in table
    assert "the least or the largest value of its grid" in table


def test_a_plan_says_how_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {**MATRIX, "vary": {"local-steps": [1, 2]}, "seeds": 2, "grid": {"lr": [0.01, 0.1, 1]}}
    assert reproduce(tmp_path, content, "--dry-run") == 0
    assert not (tmp_path / "out").exists()
    words = capsys.readouterr().out
    # (2 seeds + 2 seeds of 3 rates) x 3 rounds x 2 clients x (1 + 2) steps x 2 methods
    assert "4 cells, 288 client steps" in words


def test_side_by_side_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    content = {**MATRIX, "methods": ["fedavg"], "vary": {"partition": ["iid", "classes:9"]}}
    assert reproduce(tmp_path / "one", content) == 0
    assert reproduce(tmp_path / "two", content, "--workers", "2") == 0
    one, two = runs(tmp_path / "one"), runs(tmp_path / "two")
    for summary in chain(*one.values(), *two.values()):
        summary["seconds"] = 0
    assert two == one
    assert "classes:9" in one["partition=classes:9", "fedavg"][0]["error"]


# ---- recipes of the papers in small ----------------------------------------------------------------------------------


def test_exchanges_of_fedtan_ii_in_small_are_those_of_its_table_5(tmp_path: Path) -> None:
    """The share of exchanges beyond one a round does not depend on the data, and M has the same share of the rounds."""
    words = ["--smoke", "--results-dir", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["reproduce", "fedtan/table5", *words]) == 0
    # read again from the runs' own summaries
    shares = {label: columns_of(run, "extra-exchanges", 1) for (_, label), (run,) in runs(tmp_path).items()}
    assert {label: round(columns["extra-exchanges"], 2) for label, columns in shares.items()} == {
        "FedTAN-II (M=10)": 5.66,
        "FedTAN-II (M=50)": 23.08,
        "FedTAN-II (M=100)": 37.5,
        "FedTAN": 75,
    }
    # bits are not bytes: the printed column is eight times too large, and says so
    assert "Note: The column is headed GB and cannot be" in (tmp_path / "out/table.txt").read_text()
