"""Runs of a matrix: what is written, what is taken up again, what fails alone, and what a kill leaves."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.experiments import main
from tests.helpers.checkout import BIN, environment
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


def without_times(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {
        cell: [{key: value for key, value in run.items() if key != "seconds"} for run in summaries]
        for cell, summaries in runs(folder).items()
    }


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


def test_finished_runs_are_taken_up_unless_their_options_changed(tmp_path: Path) -> None:
    assert reproduce(tmp_path, MATRIX, "--only", "IID", "--only", "fedavg") == 0
    first = runs(tmp_path)
    assert set(first) == {("IID, local-steps=1", "fedavg"), ("IID, local-steps=2", "fedavg")}
    changed = {**MATRIX, "vary": {**MATRIX["vary"], "local-steps": {"local-steps=1": 1, "local-steps=2": 3}}}
    assert reproduce(tmp_path, changed) == 0
    second = runs(tmp_path)
    assert len(second) == 8
    # with the time that they took then
    assert second["IID, local-steps=1", "fedavg"] == first["IID, local-steps=1", "fedavg"]
    assert second["IID, local-steps=2", "fedavg"] != first["IID, local-steps=2", "fedavg"]


def test_a_failed_cell_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {**MATRIX, "vary": {"partition": ["classes:9", "iid"]}, "seeds": 1}
    assert reproduce(tmp_path, content) == 0
    done = runs(tmp_path)
    assert "classes:9" in done["partition=classes:9", "fedavg"][0]["error"]
    assert done["partition=iid", "fixbn"][0]["accuracy"] >= 0
    assert "Failed: fixbn | partition=classes:9: " in capsys.readouterr().out


def test_a_matrix_of_which_nothing_trains_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(tmp_path, {**MATRIX, "vary": {"partition": ["classes:9"]}}) == 1
    assert "no cell could train" in capsys.readouterr().err


def test_a_data_set_that_is_not_here_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {**MATRIX, "options": {**MATRIX["options"], "dataset": "folder:/nowhere"}, "smoke": {"seeds": 1}}
    assert reproduce(tmp_path, content) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedbn-flwr: recipe mine needs the data set 'folder:/nowhere' (--smoke runs it in small")


def test_rates_are_chosen_for_each_setting(tmp_path: Path) -> None:
    content = {**MATRIX, "methods": ["fedavg"], "vary": {"partition": ["iid"]}, "seeds": 1, "lr-grid": [0.0, 0.1]}
    assert reproduce(tmp_path, content) == 0
    ((run,),) = runs(tmp_path).values()
    # a rate of 0 learns nothing
    assert (run["lr"], set(run["lr-grid"])) == (0.1, {"0", "0.1"})


def test_a_plan_says_how_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(tmp_path, {**MATRIX, "vary": {"local-steps": [1, 2]}, "seeds": 2}, "--dry-run") == 0
    assert not (tmp_path / "out").exists()
    words = capsys.readouterr().out
    # 2 seeds x 3 rounds x 2 clients x (1 + 2) steps x 2 methods
    assert "4 cells, 72 client steps, about 0:00:0" in words


def test_side_by_side_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    content = {**MATRIX, "vary": {"partition": ["iid", "classes:9"]}, "seeds": 1}
    assert reproduce(tmp_path / "one", content) == 0
    assert reproduce(tmp_path / "two", content, "--workers", "2") == 0
    assert without_times(tmp_path / "two") == without_times(tmp_path / "one")


def test_two_matrices_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert reproduce(tmp_path, MATRIX) == 2
    assert "another matrix is running in" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_started_again_ends_with_the_same_table(tmp_path: Path) -> None:
    """The kill comes in the middle of a run, after its checkpoint."""
    content = {**MATRIX, "options": {**MATRIX["options"], "rounds": 260}, "vary": {"partition": ["iid"]}, "seeds": 1}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert reproduce(tmp_path / "whole", content) == 0
    path = tmp_path / "killed/mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    words = [str(path), "--results-dir", str(tmp_path / "killed/out"), "--device", "cpu"]
    process = subprocess.Popen(
        [BIN / "fedbn-flwr", "reproduce", *words],
        env=environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    second = tmp_path / "killed/out/partition=iid/fixbn-seed0"
    while not list(second.glob("checkpoint-1*")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (second / "summary.json").exists()
    first_rows = (second / "rounds.jsonl").read_text().splitlines()[:100]
    assert main(["reproduce", *words]) == 0
    # the rows of the first rounds, with their times, are those from before the kill
    assert (second / "rounds.jsonl").read_text().splitlines()[:100] == first_rows
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")
    assert (tmp_path / "killed/out/table.txt").read_text() == (tmp_path / "whole/out/table.txt").read_text()
