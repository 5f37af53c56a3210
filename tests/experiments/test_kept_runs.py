"""Runs are kept: the same command goes on, another one is refused, and nothing that is finished is lost."""

import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import ArrayRecord, MetricRecord

from fedbn_flwr.experiments import checkpoint, kept_run, main
from fedbn_flwr.experiments.checkpoint import Checkpoint, write_checkpoint
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.experiments.output.run_folder import RunFolder
from fedbn_flwr.experiments.results.folders import read_parts
from fedbn_flwr.experiments.results.rows import rounds_of
from tests.helpers.checkout import BIN
from tests.helpers.runs import command, results, run, summary_bytes

METHODS = "fedavg,fedbn"
FOLDERS = [f"{method}-seed{seed}" for method in ("fedavg", "fedbn") for seed in range(2)]
TINY = {"dataset": "digits", "model": "mlp", "rounds": "12", "evaluate_every": "6", "workers": "1"}


def compare_words(folder: Path, *words: str, **options: str) -> Sequence[str]:
    return command("compare", "--methods", METHODS, *words, results_dir=str(folder), **{**TINY, **options})


def all_results(folder: Path) -> dict[str, Any]:
    """Return rounds, summaries and models of all runs, without times, and the order of the table."""
    table = [(row["method"], row["seed"]) for row in json.loads((folder / "compare.json").read_text())]
    return {"table": table, **{name: results(folder / name) for name in FOLDERS}}


def check_report(folder: Path) -> None:
    """What a report reads is what the runs' own files say."""
    (part,) = read_parts([folder])
    for row in part.rows:
        finished = Path(row["folder"], "summary.json").exists()
        assert row["state"] == ("finished" if finished else "unfinished" if rounds_of(row) else "waiting")
    assert {Path(row["folder"]) for row in part.rows} >= {path.parent for path in folder.glob("*/summary.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    assert main(compare_words(folder, "--seeds", "2")) == 0
    return all_results(folder)


def say_ready_and_run(connection: Connection, words: Sequence[str]) -> None:
    """Run a command; the imports are not a part of what is killed."""
    connection.send("ready")
    main(words)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_with_the_same_bits(kills: int, tmp_path: Path, whole: dict[str, Any]) -> None:
    moments, folder = random.Random(kills), tmp_path / "out"
    words = compare_words(folder, "--seeds", "2")
    start = get_context("forkserver")
    for _ in range(kills):
        here, there = start.Pipe(duplex=False)
        process = start.Process(target=say_ready_and_run, args=(there, words))
        process.start()
        here.recv()
        time.sleep(moments.uniform(0.05, 1.0))
        process.kill()
        process.join()
        if any(folder.glob("*-seed*/config.json")):
            check_report(folder)
    assert main(words) == 0
    assert all_results(folder) == whole
    check_report(folder)


def test_a_disk_that_is_full_at_times_costs_no_bit(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every so many files one cannot be written; in each turn more can."""
    words, written, every, write = compare_words(tmp_path, "--seeds", "2"), [0], [10], Path.write_bytes

    def full_at_times(path: Path, content: bytes) -> int:
        written[0] += 1
        if written[0] % every[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full_at_times)
        assert main(words) == 1
        assert re.search("methods failed|No space left on device", capsys.readouterr().err)
        every[0] = 40
        assert main(words) in (0, 1)
    assert main(words) == 0
    assert all_results(tmp_path) == whole
    check_report(tmp_path)


def test_the_same_command_reuses_and_more_seeds_and_methods_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"results_dir": str(tmp_path)}
    assert run("compare", "--methods", "fedavg", "--seeds", "2", **options) == 0
    first = summary_bytes(tmp_path)
    assert run("compare", "--methods", "fedbn", **options) == 0
    assert run("compare", "--methods", "fedavg", "--seeds", "3", **options) == 0
    assert "2 of 3 runs finished" in capsys.readouterr().out
    table = [(row["method"], row["seed"]) for row in json.loads((tmp_path / "compare.json").read_text())]
    assert table == [("fedavg", 0), ("fedavg", 1), ("fedavg", 2), ("fedbn", 0)]
    assert {name: content for name, content in summary_bytes(tmp_path).items() if name in first} == first


def test_another_run_is_refused_before_anything_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"results_dir": str(tmp_path)}
    assert run("compare", "--methods", "fedavg", **options) == 0
    first = summary_bytes(tmp_path)
    capsys.readouterr()
    for methods in ("fedbn,fedavg", "fedbn"):
        assert run("compare", "--methods", methods, lr="0.3", **options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "its lr is 0.1, not 0.3" in line
        assert "--overwrite" in line
        assert not (tmp_path / "fedbn-seed0").exists()
    assert summary_bytes(tmp_path) == first
    assert run("compare", "--methods", "fedbn", "--overwrite", lr="0.3", **options) == 0
    assert [row["method"] for row in json.loads((tmp_path / "compare.json").read_text())] == ["fedbn"]
    assert summary_bytes(tmp_path)["fedavg-seed0"] == first["fedavg-seed0"]


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
def test_results_whose_options_are_lost_are_nobodys(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"results_dir": str(tmp_path), "rounds": "1"}
    assert run("compare", "--methods", "fedavg", **options) == 0
    first, config = summary_bytes(tmp_path), tmp_path / "fedavg-seed0" / "config.json"
    config.unlink() if content is None else config.write_text(content)
    for methods in ("fedavg", "fedbn"):
        capsys.readouterr()
        assert run("compare", "--methods", methods, **{**options, "rounds": "2"}) == 2
        assert "its config.json is missing or cannot be read (--overwrite " in capsys.readouterr().err
    assert summary_bytes(tmp_path) == first
    assert run("compare", "--methods", "fedavg", "--overwrite", **{**options, "rounds": "2"}) == 0
    assert [row["rounds"] for row in json.loads((tmp_path / "compare.json").read_text())] == [2]


def test_another_grid_is_refused_before_it_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"results_dir": str(tmp_path), "rounds": "1", "evaluate_every": "1"}
    words = ["compare", "--methods", "fedavg", "--grid-seeds", "1"]
    assert run(*words, "--grid", "lr=0.1,0.03", **options) == 0
    first = summary_bytes(tmp_path)
    for grid in ("lr=0.1,0.03,0.3", "momentum=0.5"):
        assert run(*words, "--grid", grid, **options) == 2
        assert "its grid is 'lr=0.1,0.03 by 1 seeds', not " in capsys.readouterr().err
    assert len(list((tmp_path / "grid").iterdir())) == 2
    assert run(*words, "--grid", "lr=0.1,0.03", **options) == 0
    assert summary_bytes(tmp_path) == first


def test_a_run_keeps_its_folder_until_the_one_that_replaces_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"results_dir": str(tmp_path)}
    assert run("run", **options) == 0
    first = (tmp_path / "summary.json").read_bytes()
    assert run("run", **options) == 0
    assert (tmp_path / "summary.json").read_bytes() == first
    capsys.readouterr()
    assert run("run", lr="0.3", **options) == 2
    assert "its lr is 0.1, not 0.3 (--overwrite replaces it)" in capsys.readouterr().err
    with monkeypatch.context() as stopped:
        stopped.setattr(RunFolder, "finish", Mock(side_effect=KeyboardInterrupt))
        assert run("run", "--overwrite", lr="0.3", **options) == 130
    assert re.search(
        r"kept in .*: .* goes on after round [123] of 3; run the same again to go on", capsys.readouterr().err
    )
    assert (tmp_path / "replaced/summary.json").read_bytes() == first
    assert run("run", lr="0.3", **options) == 0
    assert not (tmp_path / "replaced").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["lr"] == 0.3


def test_checkpoints_cost_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes a second here, and a checkpoint a sixteenth of one: so two rounds pay for one."""
    clock, saved = [0.0], []
    record = Journal.record

    def timed_write(folder: Path, checkpoint: Checkpoint, *rest: Any) -> None:
        write_checkpoint(folder, checkpoint, *rest)
        clock[0] += 1 / 16
        saved.append(checkpoint.server_round)

    def timed_record(journal: Journal, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        clock[0] += 1
        return record(journal, server_round, arrays)

    monkeypatch.setattr(checkpoint, "monotonic", lambda: clock[0])
    monkeypatch.setattr(checkpoint, "write_checkpoint", timed_write)
    monkeypatch.setattr(Journal, "record", timed_record)
    assert run("run", rounds="8", results_dir=str(tmp_path)) == 0
    assert saved == [1, 3, 5, 7]


def test_moving_results_aside_can_be_killed_at_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("summary.json", "model.safetensors", "rounds.jsonl", "config.json")
    for name in names:
        (tmp_path / name).write_text(name)
    rename, count = Path.rename, [0]

    def dying(path: Path, target: Path) -> Path:
        count[0] += 1
        if count[0] in (2, 4):
            raise KeyboardInterrupt
        return Path(rename(path, target))

    monkeypatch.setattr(Path, "rename", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            kept_run.set_aside(tmp_path)
    kept_run.set_aside(tmp_path)
    assert {path.name: path.read_text() for path in (tmp_path / "replaced").iterdir()} == {name: name for name in names}


def test_sigterm_ends_it_as_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(RunFolder, "finish", ask)
    before = signal.getsignal(signal.SIGTERM)
    assert main(compare_words(tmp_path)) == 143
    assert re.search(r"fedavg-seed0 goes on after round \d+ of 12", capsys.readouterr().err)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_picture_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("fedbn_flwr.experiments.results.pictures.plot_curves", broken)
    assert run("run", results_dir=str(tmp_path)) == 0
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("words", ["run", "compare --methods fedavg", "reproduce fedtan/table5 --smoke"])
def test_two_processes_do_not_share_a_folder(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([*words.split(), "--results-dir", str(tmp_path)]) == 2
    assert f"another process is running in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("run",), ("compare", "--methods", "fedavg")])
def test_what_is_finished_is_read_where_nothing_can_be_written(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*words, results_dir=str(tmp_path)) == 0
    for path in (*tmp_path.rglob("*"), tmp_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # root may write everywhere, unless it gives that up
    powerless = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    program = [*powerless, str(BIN / "fedbn-flwr")]
    done, other = (
        subprocess.run(
            [*program, *command(*words, rounds=rounds, results_dir=str(tmp_path))], capture_output=True, check=False
        )
        for rounds in ("3", "4")
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert other.returncode == 2
    assert b"its rounds is 3, not 4" in other.stderr
