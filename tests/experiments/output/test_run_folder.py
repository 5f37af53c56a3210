"""What a run leaves behind."""

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr.experiments.output.run_folder import RunFolder, command_line, installed_versions, read_rounds
from fedbn_flwr.state import to_record
from tests.helpers.runs import DATA, run, run_in

FILES = {"config.json", "rounds.jsonl", "summary.json", "model.safetensors"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FixBN that freezes after the second of three rounds."""
    path = tmp_path_factory.mktemp("run") / "deep" / "results"
    assert run("run", method="fixbn:freeze-round=2", seed="3", results_dir=str(path)) == 0
    return run_in(path)


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_in(folder) / "summary.json").read_text())
    return content


def test_the_summary_tells_the_whole_run(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    summary = summary_of(folder)
    wanted = {
        "method": "fixbn:freeze-round=2",
        "strategy": "fixbn",
        "norm": "bn",
        "model": "small-cnn",
        "dataset": DATA,
        "partition": "iid",
        "clients": 2,
        "rounds": 3,
        "seed": 3,
        "exchanges": 3,
    }
    assert {key: summary[key] for key in wanted} == wanted
    assert 0 <= summary["accuracy"] <= 1
    assert 0 < summary["paper-bytes"] < summary["payload-bytes"]
    assert summary["seconds"] > 0


def test_the_training_loss_of_the_global_model_is_reported_where_it_is_evaluated(tmp_path: Path) -> None:
    options = {"train_loss_global": "true", "results_dir": str(tmp_path)}
    assert run("run", method="fedavg", **options) == 0
    rows = read_rounds(run_in(tmp_path))
    assert ["train-loss-global" in row for row in rows] == [False, True, True]
    assert rows[-1]["train-loss-global"] != pytest.approx(rows[-1]["train-loss"], rel=1e-3)
    assert run("run", method="fedbn", **options) == 0
    folder = run_in(tmp_path, "fedbn")
    assert ["train-loss-global" in row for row in read_rounds(folder)] == [False, True, True]
    # what nodes evaluate is not counted as training
    summary = summary_of(folder)
    assert (summary["exchanges"], summary["evaluation-payload-bytes"] > 0) == (3, True)


def test_rounds_are_written_one_a_line(folder: Path) -> None:
    rounds, summary = read_rounds(folder), summary_of(folder)
    assert [row["round"] for row in rounds] == [1, 2, 3]
    for row in rounds:
        assert row["train-loss"] > 0
        assert row["seconds"] > 0
        assert (row["exchanges"], row["nodes"]) == (1, 2)
    # evaluated every second round, and after the last
    assert ["accuracy" in row for row in rounds] == [False, True, True]
    assert {key: rounds[-1][key] for key in ("accuracy", "loss", "train-loss")} == {
        key: summary[key] for key in ("accuracy", "loss", "train-loss")
    }
    total = sum(row[f"payload-bytes-{way}"] for row in rounds for way in ("down", "up"))
    assert total == summary["payload-bytes"]
    assert sum(row["paper-bytes"] for row in rounds) == summary["paper-bytes"]


def test_the_config_repeats_the_run(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    assert {"flwr", "torch", "python", "fedbn-flwr"} <= set(content["versions"])
    assert installed_versions(["torch", "not-installed"]) == {"torch": version("torch")}
    options = {key: str(value) for key, value in content["options"].items() if value != ""}
    assert options["freeze-round"] == "2.0"
    assert run("run", **{**options, "results-dir": str(tmp_path)}) == 0
    first, again = (load_file(path / "model.safetensors") for path in (folder, run_in(tmp_path)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert summary_of(tmp_path)["accuracy"] == summary_of(folder)["accuracy"]


def test_the_summary_is_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("fedbn_flwr.experiments.output.run_folder.save", full)
    with pytest.raises(OSError, match="no space left"):
        RunFolder(tmp_path).finish({"accuracy": 1.0}, to_record({"weight": torch.zeros(1)}))
    assert not (tmp_path / "summary.json").exists()


def test_a_run_that_diverges_is_still_json(tmp_path: Path) -> None:
    RunFolder(tmp_path).finish({"loss": math.nan, "rows": [[1.5, -math.inf]]}, to_record({"weight": torch.zeros(1)}))
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": None, "rows": [[1.5, None]]}


@pytest.mark.parametrize("words", [["--token", "abc123"], ["--token=abc123"]])
def test_flowers_task_token_is_not_written_down(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/flwr-serverapp", *words, "--parent-pid", "7"])
    assert "abc123" not in command_line()
    assert command_line().startswith("flwr-serverapp --token")
    assert command_line().endswith(" --parent-pid 7")
