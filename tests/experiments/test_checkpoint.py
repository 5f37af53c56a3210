"""Checkpoints that cannot be used, and why."""

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbn_flwr.experiments import main, runs
from fedbn_flwr.experiments.checkpoint import (
    OLD,
    PARTIAL,
    Checkpoint,
    read_checkpoint,
    remove_checkpoints,
    write_checkpoint,
)
from tests.helpers.deaths import Death, dying
from tests.helpers.runs import command, run_in

OPTIONS = {"method": "fedbn", "model": "mlp", "engine": "inprocess", "checkpoint_every": "2"}
LAST = "checkpoint-2"


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that died in its last round."""
    folder = tmp_path_factory.mktemp("died") / "run"
    with dying(0) as moments:
        assert main(command("run", results_dir=str(folder.with_name("whole")), **OPTIONS)) == 0
    with dying(int(0.8 * moments.count)), pytest.raises(Death):
        main(command("run", results_dir=str(folder), **OPTIONS))
    assert (run_in(folder) / LAST).is_dir()
    return run_in(folder)


@pytest.fixture
def run(died: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(died, tmp_path / "run"))


def refusal(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """Return the one line that says why a run cannot be resumed."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}

    before = files()
    assert main(["run", "--resume", str(run), *words]) == 2
    assert files() == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


OTHERS = {
    ("--method", "fedavg"): "its method is 'fedbn', not 'fedavg'",
    ("--method", "fedbn:mean-personal=true"): "its method is 'fedbn', not 'fedbn:mean-personal=true'",
    ("--lr", "0.2"): "its lr is 0.1, not 0.2",
    ("--mean-personal", "true"): "its mean-personal is None, not True",
    ("--engine", "stacked"): "its engine is 'inprocess', not 'stacked'",
}


@pytest.mark.parametrize("words", OTHERS)
def test_another_run_is_refused_by_what_differs(
    words: tuple[str, str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, run, *words).startswith(f"fedbn-flwr: {run} cannot be resumed: {OTHERS[words]}")


def test_a_run_of_a_study_that_another_process_holds_is_not_resumed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "study.json").write_text("{}")
    with (run.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"another process is running in {run.parent}" in refusal(capsys, run)


def test_the_runs_own_options_and_those_that_change_no_bit_are_taken(run: Path, tmp_path: Path) -> None:
    words = ["--lr", "0.1", "--method", "fedbn", "--engine", "inprocess", "--timeout", "9", "--state-dir"]
    assert main(["run", "--resume", str(run), *words, str(tmp_path / "states")]) == 0


def test_another_version_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(runs.VERSIONS, "fedbn-flwr", "7.0")
    assert "its version of fedbn-flwr is " in refusal(capsys, run)
    monkeypatch.undo()
    monkeypatch.setitem(runs.VERSIONS, "torch", "7.0")
    assert "its version of torch is " in refusal(capsys, run)


def test_another_architecture_under_the_same_name_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = read_checkpoint(run)
    remove_checkpoints(run)
    name = next(iter(saved.model))
    (run / "rounds.jsonl").touch()
    write_checkpoint(run, replace(saved, model={**saved.model, name: np.zeros((3, 5), np.float32)}), None)
    assert f"its model's entry {name!r} is ((3, 5), 'float32'), not " in refusal(capsys, run)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def forget_rows(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))


def lose_format(path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    del saved["format"]
    torch.save(saved, path)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (f"{LAST}/server.pt", truncate, "server.pt cannot be read: "),
    "something else": (
        f"{LAST}/server.pt",
        lambda path: shutil.copy(path.with_name("nodes") / "1.records", path),
        "server.pt cannot be read: ",
    ),
    "no file": (f"{LAST}/server.pt", Path.unlink, "server.pt cannot be read: "),
    "of an earlier version": (
        f"{LAST}/server.pt",
        lose_format,
        "its format is 1, and this version goes on with 4 only",
    ),
    "a node's state truncated": (f"{LAST}/nodes/1.records", truncate, "is damaged: nodes/1.records should have "),
    "a node's state lost": (f"{LAST}/nodes/0.records", Path.unlink, "is damaged: nodes/0.records should have "),
    "rows lost": ("rounds.jsonl", forget_rows, "does not have the rows of the first 2 rounds"),
    "options lost": ("config.json", Path.unlink, "cannot be resumed: its config.json is missing, cannot"),
    "all rows lost": ("rounds.jsonl", Path.unlink, "does not have the rows of the first 2 rounds"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, change, said = DAMAGES[damage]
    change(run / name)
    assert said in refusal(capsys, run)


def test_rows_after_the_checkpoint_may_be_torn(run: Path) -> None:
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "no')
    assert main(["run", "--resume", str(run)]) == 0
    assert [json.loads(row)["round"] for row in (run / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_without_a_checkpoint_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, tmp_path).endswith("it has no checkpoint (`checkpoint-every` makes some)")
    assert main(command("run", results_dir=str(tmp_path), **OPTIONS)) == 0
    assert refusal(capsys, tmp_path).endswith("it has no checkpoint (the run is complete)")


def test_what_a_checkpoint_cannot_hold_is_named_when_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").touch()
    odd = Checkpoint(1, {}, {"kept": object()}, {})
    with pytest.raises(TypeError, match="a checkpoint cannot hold object"):
        write_checkpoint(tmp_path, odd, None)
    assert not list(tmp_path.glob("checkpoint-[0-9]*"))


@pytest.mark.parametrize("leftover", [PARTIAL, OLD])
def test_half_a_checkpoint_that_a_death_left_is_replaced(
    leftover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # folders are listed in any order: here, a checkpoint is to be removed before half of another one is
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: sorted(glob(path, pattern)))
    (tmp_path / "rounds.jsonl").touch()
    write_checkpoint(tmp_path, Checkpoint(2, {}, {}, {}), None)
    (tmp_path / leftover / "nodes").mkdir(parents=True)
    (tmp_path / leftover / "nodes" / "7.records").touch()
    write_checkpoint(tmp_path, Checkpoint(4, {}, {}, {}), None)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert read_checkpoint(tmp_path).nodes == {}
