"""`--log-to`: TensorBoard's and Weights & Biases' own files, read back, have the numbers of `rounds.jsonl`."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.output.sinks import numbers_of
from tests.helpers.deaths import Death, dying
from tests.helpers.runs import OPTIONS, command, run, run_in

SMALL = {"model": "mlp", "rounds": "5", "engine": "inprocess", "log_to": "tensorboard"}
BLOCK, FIRST = 32 * 1024, 7


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return name -> (round, value) as TensorBoard shows them."""
    events = EventAccumulator(str(run_in(folder) / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def columns(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the numbers of `rounds.jsonl` as (round, approximate value); TensorBoard's are of single precision."""
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

    ENGINES["inprocess"](resolve({**OPTIONS, "model": "mlp", "log-to": "tensorboard"}), tmp_path, look)
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_a_run_that_goes_on_has_each_round_once(tmp_path: Path) -> None:
    tmp_path, whole_path = tmp_path / "run", tmp_path / "whole"
    arguments = command("run", **SMALL, checkpoint_every="3", results_dir=str(tmp_path))
    with dying(0) as whole:
        assert main([*arguments, "--results-dir", str(whole_path)]) == 0
    with dying(whole.count - 9), pytest.raises(Death):  # after the last round, before the model is written
        main(arguments)
    # rounds 4 and 5 are repeated
    assert (run_in(tmp_path) / "checkpoint-3").exists()
    assert [number for number, _ in scalars(tmp_path)["train-loss"]] == [1, 2, 3, 4, 5]
    assert main(["run", "--resume", str(tmp_path)]) == 0
    assert len(list((run_in(tmp_path) / "tensorboard").iterdir())) == 2
    assert scalars(tmp_path) == columns(tmp_path)


def test_weights_and_biases_has_the_numbers_of_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert run("run", **{**SMALL, "log_to": "wandb"}, results_dir=str(tmp_path)) == 0
    (file,) = run_in(tmp_path).glob("wandb/offline-run-*/run-*.wandb")
    records = list(records_of(file))
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert (begun.project, begun.run_group, begun.display_name) == ("fedbn-flwr", "fedavg", "fedavg, seed 0")
    assert json.loads(next(item.value_json for item in begun.config.update if item.key == "rounds")) == 5
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
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        record += content[position + FIRST : position + FIRST + length]
        position += FIRST + length
        if kind in (1, 4):  # whole, or the last part
            yield parse(record)
            record = b""


def test_only_numbers_are_logged_and_those_of_a_mapping_under_its_name() -> None:
    row = {"round": 3, "accuracy": 0.5, "loss": None, "stage": "one", "done": True, "f1": {"a": {"x": 1.0}, "b": 2}}
    assert numbers_of(row) == {"round": 3, "accuracy": 0.5, "f1/a/x": 1.0, "f1/b": 2}
