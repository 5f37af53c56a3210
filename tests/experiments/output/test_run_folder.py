"""What a run leaves behind, and where else its rounds are logged: TensorBoard and Weights & Biases,
read back.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.experiment import resolve
from fedbn_flwr.experiments.output.run_folder import (
    RunFolder,
    command_line,
    installed_versions,
    read_rounds,
)
from fedbn_flwr.experiments.output.sinks import numbers_in
from fedbn_flwr.state import to_record
from tests.helpers.deaths import Death, dying
from tests.helpers.runs import DATA, OPTIONS, command, run, run_in

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


def test_the_training_loss_of_the_global_model_is_reported_where_it_is_evaluated(
    tmp_path: Path,
) -> None:
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
    RunFolder(tmp_path).finish(
        {"loss": math.nan, "rows": [[1.5, -math.inf]]}, to_record({"weight": torch.zeros(1)})
    )
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": None, "rows": [[1.5, None]]}


@pytest.mark.parametrize("words", [["--token", "abc123"], ["--token=abc123"]])
def test_flowers_task_token_is_not_written_down(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/flwr-serverapp", *words, "--parent-pid", "7"])
    assert "abc123" not in command_line()
    assert command_line().startswith("flwr-serverapp --token")
    assert command_line().endswith(" --parent-pid 7")


# ---- where each round is logged beside -----------------------------------------------------------


SMALL = {"model": "mlp", "rounds": "5", "engine": "inprocess", "log_to": "tensorboard"}
BLOCK, FIRST = 32 * 1024, 7


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return name -> (round, value) as TensorBoard shows them."""
    events = EventAccumulator(str(run_in(folder) / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def columns(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the numbers of `rounds.jsonl` as (round, approximate value); TensorBoard's are of
    single precision.
    """
    found: dict[str, list[tuple[int, Any]]] = {}
    for row in read_rounds(run_in(folder)):
        for name, value in row.items():
            found.setdefault(name, []).append((row["round"], pytest.approx(value, rel=1e-6)))
    return found


def test_tensorboard_has_the_numbers_of_every_round(tmp_path: Path) -> None:
    assert run("run", **SMALL, results_dir=str(tmp_path)) == 0
    assert scalars(tmp_path) == columns(tmp_path)
    # rounds 2 and 4 are evaluated, and the last
    assert [number for number, _ in scalars(tmp_path)["accuracy"]] == [2, 4, 5]
    events = EventAccumulator(str(run_in(tmp_path) / "tensorboard")).Reload()
    (text,) = events.Tensors("options/text_summary")
    assert b"method: fedavg\n" in text.tensor_proto.string_val[0]


def test_a_round_is_there_when_it_has_ended(tmp_path: Path) -> None:
    seen = []

    def look(done: int, total: int, accuracy: float | None) -> None:
        seen.append((done, scalars(tmp_path)["train-loss"][-1][0]))

    ENGINES["inprocess"](
        resolve({**OPTIONS, "model": "mlp", "log-to": "tensorboard"}), tmp_path, look
    )
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_a_run_that_goes_on_has_each_round_once(tmp_path: Path) -> None:
    tmp_path, whole_path = tmp_path / "run", tmp_path / "whole"
    arguments = command("run", **SMALL, checkpoint_every="3", results_dir=str(tmp_path))
    with dying(0) as whole:
        assert main([*arguments, "--results-dir", str(whole_path)]) == 0
    # after the last round, before the model is written
    with (
        dying(whole.count - 9),
        pytest.raises(Death),
    ):
        main(arguments)
    # rounds 4 and 5 are repeated
    assert (run_in(tmp_path) / "checkpoint-3").exists()
    assert [number for number, _ in scalars(tmp_path)["train-loss"]] == [1, 2, 3, 4, 5]
    assert main(["run", "--resume", str(tmp_path)]) == 0
    assert len(list((run_in(tmp_path) / "tensorboard").iterdir())) == 2
    assert scalars(tmp_path) == columns(tmp_path)


@pytest.mark.slow
def test_weights_and_biases_has_the_numbers_of_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert run("run", **{**SMALL, "log_to": "wandb"}, results_dir=str(tmp_path)) == 0
    (file,) = run_in(tmp_path).glob("wandb/offline-run-*/run-*.wandb")
    records = list(records_of(file))
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert (begun.project, begun.run_group, begun.display_name) == (
        "fedbn-flwr",
        "fedavg",
        "fedavg, seed 0",
    )
    assert (
        json.loads(next(item.value_json for item in begun.config.update if item.key == "rounds"))
        == 5
    )
    steps = [record.history for record in records if record.HasField("history")]
    assert [step.step.num for step in steps] == [1, 2, 3, 4, 5]
    assert [numbers(step.item) for step in steps] == read_rounds(run_in(tmp_path))
    (end,) = [record.exit for record in records if record.HasField("exit")]
    assert end.exit_code == 0


def numbers(items: Sequence[Any]) -> Mapping[str, float]:
    """Return the numbers of a step, without those that the library adds."""
    values = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in items}
    return {name: value for name, value in values.items() if not name.startswith("_")}


def records_of(file: Path) -> Any:
    """Read a file of Weights & Biases: a log as LevelDB's, in blocks, of protocol buffers."""
    parse = import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    content, position, record = file.read_bytes(), FIRST, b""
    while position < len(content):
        if BLOCK - position % BLOCK < FIRST:  # no room for a header: the rest of the block is zeros
            position += BLOCK - position % BLOCK
            continue
        length, kind = (
            int.from_bytes(content[position + 4 : position + 6], "little"),
            content[position + 6],
        )
        record += content[position + FIRST : position + FIRST + length]
        position += FIRST + length
        if kind in (1, 4):  # whole, or the last part
            yield parse(record)
            record = b""


def test_only_numbers_are_logged_and_those_of_a_mapping_under_its_name() -> None:
    row = {
        "round": 3,
        "accuracy": 0.5,
        "loss": None,
        "stage": "one",
        "done": True,
        "f1": {"a": {"x": 1.0}, "b": 2},
    }
    assert numbers_in(row) == {"round": 3, "accuracy": 0.5, "f1/a/x": 1.0, "f1/b": 2}
