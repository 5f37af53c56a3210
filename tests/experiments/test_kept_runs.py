"""Runs are kept: the same command goes on, another run lies beside, and nothing that is finished is
lost.
"""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import rows
from fedbn_flwr.experiments import checkpoint, main
from fedbn_flwr.experiments.checkpoint import Checkpoint, write_checkpoint
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.server.round import Round
from tests.helpers.checkout import BIN, ROOT
from tests.helpers.registered import registries_restored
from tests.helpers.runs import command, results, run, run_in, summary_bytes

METHODS = "fedavg,fedbn"
RUNS = [(method, seed) for method in ("fedavg", "fedbn") for seed in range(2)]
TINY = {"dataset": "digits", "model": "mlp", "rounds": "12", "evaluate_every": "6", "workers": "1"}


def compare_words(folder: Path, *words: str, **options: str) -> Sequence[str]:
    return command(
        "compare", "--methods", METHODS, *words, results_dir=str(folder), **{**TINY, **options}
    )


def all_results(folder: Path) -> dict[str, Any]:
    """Return rounds, summaries and models of all runs, without times."""
    return {f"{method} {seed}": results(run_in(folder, method, seed)) for method, seed in RUNS}


def listed(folder: Path) -> list[tuple[str, int]]:
    """Return the runs that were asked for last."""
    return [
        (row["method"], row["seed"])
        for row in json.loads((folder / "study.json").read_text())["runs"]
    ]


def check_report(folder: Path) -> None:
    """What a report reads is what the runs' own files say."""
    frame = rows(folder)
    for path, state in zip(map(Path, frame["folder"]), frame["state"], strict=True):
        finished = (path / "summary.json").exists()
        assert state == (
            "finished" if finished else "unfinished" if read_rounds(path) else "waiting"
        )
    assert {*map(Path, frame["folder"])} >= {path.parent for path in folder.glob("*/summary.json")}


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
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    kills: int, tmp_path: Path, whole: dict[str, Any]
) -> None:
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
    tmp_path: Path,
    whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every so many files one cannot be written; in each turn more can."""
    words, written, every, write = (
        compare_words(tmp_path, "--seeds", "2"),
        [0],
        [10],
        Path.write_bytes,
    )

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
    assert run("run", "--method", "fedavg", **options) == 0
    assert run("compare", "--methods", "fedbn,fedavg", **options) == 0
    assert "1 of 2 runs finished" in capsys.readouterr().out
    assert listed(tmp_path) == [("fedbn", 0), ("fedavg", 0)]
    assert run("compare", "--methods", "fedavg", "--seeds", "3", **options) == 0
    assert "2 of 3 runs finished" in capsys.readouterr().out
    assert listed(tmp_path) == [("fedavg", 0), ("fedavg", 1), ("fedavg", 2)]
    last = summary_bytes(tmp_path)
    assert len(last) == 4
    assert {name: last[name] for name in first} == first


@pytest.mark.parametrize(
    "words", ["--lr 0.3", "--grid lr=0.1,0.3 --grid-seeds 1", "--engine inprocess"]
)
@pytest.mark.sampled(1)
def test_another_run_lies_beside(words: str, tmp_path: Path) -> None:
    options = {"results_dir": str(tmp_path)}
    assert run("compare", "--methods", "fedavg", **options) == 0
    first = summary_bytes(tmp_path)
    assert run("compare", "--methods", "fedavg", *words.split(), **options) == 0
    both = summary_bytes(tmp_path)
    assert len(both) == 2
    assert first.items() < both.items()
    ((row,), name) = (json.loads((tmp_path / "study.json").read_text())["runs"], *first)
    assert row["folder"] in both.keys() - {name}


def test_options_that_change_no_bit_are_the_same_run(tmp_path: Path) -> None:
    options = {"results_dir": str(tmp_path / "here")}
    assert run("run", **options) == 0
    shutil.move(tmp_path / "here", tmp_path / "there")
    first = summary_bytes(tmp_path / "there")
    free = {"timeout": "9", "checkpoint_every": "2", "image_workers": "0"}
    assert run("run", results_dir=str(tmp_path / "there"), **free) == 0
    assert summary_bytes(tmp_path / "there") == first


@pytest.mark.parametrize("content", [None, "{", "{}", "[]", '{"options": {}}'])
@pytest.mark.sampled(2)
def test_results_whose_options_are_lost_are_nobodys(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"results_dir": str(tmp_path), "rounds": "1"}
    assert run("compare", "--methods", "fedavg", **options) == 0
    first, config = summary_bytes(tmp_path), run_in(tmp_path) / "config.json"
    config.unlink() if content is None else config.write_text(content)
    capsys.readouterr()
    assert run("run", **options) == 2
    lost = (
        "holds results of which nobody knows the options: its config.json is missing, cannot "
        "be read"
    )
    assert lost in capsys.readouterr().err
    assert run("compare", "--methods", "fedbn,fedavg", **options) == 1
    output = capsys.readouterr()
    assert lost in output.out
    assert output.err == "fedbn-flwr: 1 of 2 methods failed: fedavg\n"
    assert summary_bytes(tmp_path).items() > first.items()
    assert len(summary_bytes(tmp_path)) == 2


def test_another_run_under_the_name_of_this_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where somebody has copied a folder over another one."""
    assert run("run", results_dir=str(tmp_path / "one"), lr="0.3") == 0
    assert run("run", results_dir=str(tmp_path / "two")) == 0
    place = run_in(tmp_path / "two")
    shutil.rmtree(place)
    shutil.copytree(run_in(tmp_path / "one"), place)
    capsys.readouterr()
    assert run("run", results_dir=str(tmp_path / "two")) == 2
    assert (
        capsys.readouterr().err
        == f"fedbn-flwr: {place} holds another run: its lr is 0.3, not 0.1 (give another "
        "results-dir)\n"
    )


def test_checkpoints_cost_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes a second here, and a checkpoint a sixteenth of one: so two rounds pay for
    one.
    """
    clock, saved = [0.0], []
    record = Journal.record

    def timed_write(folder: Path, checkpoint: Checkpoint, *rest: Any) -> None:
        write_checkpoint(folder, checkpoint, *rest)
        clock[0] += 1 / 16
        saved.append(checkpoint.server_round)

    def timed_record(journal: Journal, now: Round, score: Any) -> None:
        clock[0] += 1
        record(journal, now, score)

    monkeypatch.setattr(checkpoint, "monotonic", lambda: clock[0])
    monkeypatch.setattr(checkpoint, "write_checkpoint", timed_write)
    monkeypatch.setattr(Journal, "record", timed_record)
    assert run("run", rounds="8", results_dir=str(tmp_path)) == 0
    assert saved == [1, 3, 5, 7]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_ends_a_run_after_its_round_and_the_second_one_at_once(
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record, seen, times = Journal.record, list[int](), [1]

    def asked_to_end(journal: Journal, now: Round, score: Any) -> None:
        seen.append(now.number)
        for _ in range(times[0] if now.number in (3, 6) else 0):
            os.kill(os.getpid(), number)
        record(journal, now, score)

    monkeypatch.setattr(Journal, "record", asked_to_end)
    # checkpoints cost too much, by the clock, to be made unasked
    monkeypatch.setattr(checkpoint, "TRAINING_PER_SAVING", 10**9)
    before = signal.getsignal(number)
    assert main(compare_words(tmp_path)) == code
    said = capsys.readouterr().err
    assert "stops after this round; once more stops it now" in said
    assert re.search(r"fedavg-seed0-\w+ goes on after round 3 of 12; run the same again", said)
    assert signal.getsignal(number) is before
    times[0] = 2
    seen.clear()
    assert main(compare_words(tmp_path)) == code
    # nothing of round 6 is written
    assert seen == [4, 5, 6]
    assert "goes on after round 4 of 12" in capsys.readouterr().err
    times[0] = 0
    assert main(compare_words(tmp_path)) == 0


LATE = """
import os, signal
from fedbn_flwr.strategies import FedAvg, register_strategy

@register_strategy("late")
class Late(FedAvg):
    def update(self, pooled):
        if self.round.number == self.num_rounds:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().update(pooled)
"""


def test_a_signal_in_the_last_round_lets_the_run_end_and_no_other_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    words = command(
        "compare", "--methods", "late,fedavg", plugins="late", results_dir=str(tmp_path / "out")
    )
    with registries_restored():
        assert main(words) == 143
    assert "1 of 2 runs finished; run the same again" in capsys.readouterr().err
    assert len(results(run_in(tmp_path / "out", "late"))["rounds"]) == 3


#: Ctrl-C, which a terminal sends to the whole group, comes while the process of all workers imports
IMPORTING = """
import os, signal, sys
from fedbn_flwr.experiments import main, study
study.NEEDED = ("slow",)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_interrupt_while_workers_import_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal; os.killpg(0, signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, *compare_words(tmp_path / "out", "--side-by-side", "2")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
    asked, kept = done.stderr.splitlines()
    assert asked == "fedbn-flwr: stops after this round; once more stops it now"
    assert kept.startswith(f"fedbn-flwr: stopped; kept in {tmp_path / 'out'}: nothing yet")
    assert done.returncode == 130


def test_a_picture_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("fedbn_flwr.experiments.results.results.plot_curves", broken)
    assert run("run", results_dir=str(tmp_path)) == 0
    assert (run_in(tmp_path) / "summary.json").exists()
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    "words", ["run", "compare --methods fedavg", "reproduce fedtan/table5 --smoke"]
)
def test_two_processes_do_not_share_a_folder(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([*words.split(), "--results-dir", str(tmp_path)]) == 2
    assert f"another process is running in {tmp_path}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", [("run",), ("compare", "--methods", "fedavg")])
def test_what_is_finished_is_read_where_nothing_can_be_written(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    assert run(*words, results_dir=str(tmp_path)) == 0
    for path in (*tmp_path.rglob("*"), tmp_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # root may write everywhere, unless it gives that up
    powerless = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    program = [*powerless, str(BIN / "fedbn-flwr")]
    done, other = (
        subprocess.run(
            [*program, *command(*words, rounds=rounds, results_dir=str(tmp_path))],
            capture_output=True,
            check=False,
        )
        for rounds in ("3", "4")
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert other.returncode == 1
    assert b"Permission denied" in other.stderr
