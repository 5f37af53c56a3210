"""A run that died at any moment and is resumed has the files of a run that did not, or says why it
cannot be.
"""

import fcntl
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.checkpoint import (
    OLD,
    PARTIAL,
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.deaths import Death, dying, going_on, run_in_process
from tests.helpers.runs import command, results, run_in

#: what nodes keep, what the server keeps, and both
CASES: dict[str, dict[str, Any]] = {
    "nodes' states in files": {
        "method": "fedbn",
        "momentum": "0.9",
        "momentum_state": "local",
        "engine": "inprocess",
        "record_dynamics": "2",
        "state_dir": "states",
    },
    "server optimizer": {"method": "fedavg", "server_optimizer": "yogi", "engine": "stacked"},
    "layer-wise": {
        "method": "fedtan",
        "engine": "stacked",
        "momentum": "0.9",
        "momentum_state": "local",
    },
}
SMALL = {"model": "mlp", "rounds": "5", "checkpoint_every": "2"}


class Whole(NamedTuple):
    """A run that did not die: its results, and how many moments it had to die at."""

    case: str
    results: dict[str, Any]
    moments: int


def words(case: str, folder: Path) -> Sequence[str]:
    options = {**SMALL, **CASES[case]}
    if "state_dir" in options:
        options["state_dir"] = str(folder.parent / options["state_dir"])
    return command("run", results_dir=str(folder), **options)


def written(folder: Path) -> dict[str, Any]:
    """Return what is in a run's folder, without times and the folder's own name."""
    folder = run_in(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("results-dir", "state-dir"):
        del config["options"][key]
    # a run's own, and the test's program where it runs in its process
    assert config.pop("command")
    dynamics = [path.read_text() for path in folder.glob("dynamics.jsonl")]
    return {**results(folder), "config": config, "dynamics": dynamics}


@pytest.fixture(scope="module", params=CASES)
def uninterrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with dying(0) as moments:
        assert main(words(request.param, folder)) == 0
    return Whole(request.param, written(folder), moments.count)


@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(deaths=st.lists(st.floats(0, 1), min_size=1, max_size=3))
@pytest.mark.sampled(1)
def test_the_moment_of_death_does_not_matter(
    uninterrupted: Whole, tmp_path: Path, deaths: list[float]
) -> None:
    case, expected, count = uninterrupted
    shutil.rmtree(tmp_path)
    folder = tmp_path / "run"
    arguments = words(case, folder)
    for share in deaths:
        with dying(1 + int(share * count)):
            try:
                assert main(arguments) == 0
                break
            except Death:
                arguments = going_on(folder, words(case, folder))
    else:
        assert main(arguments) == 0
    assert written(folder) == expected


def test_a_run_goes_on_where_its_checkpoint_is(uninterrupted: Whole, tmp_path: Path) -> None:
    # not from its start: that would have the same results
    with dying(int(0.9 * uninterrupted.moments)), pytest.raises(Death):
        main(words(uninterrupted.case, tmp_path / "run"))
    with dying(0) as rest:
        assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert rest.count < uninterrupted.moments / 2
    assert written(tmp_path / "run") == uninterrupted.results


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_killed_simulation_of_flowers(tmp_path: Path) -> None:
    # its nodes keep their states themselves
    options = {
        **SMALL,
        "method": "fedbn",
        "momentum": "0.9",
        "momentum_state": "local",
        "engine": "ray",
    }
    code, count = run_in_process(0, command("run", results_dir=str(tmp_path / "whole"), **options))
    assert code == 0
    killed = run_in_process(
        int(0.8 * count), command("run", results_dir=str(tmp_path / "run"), **options)
    )
    assert killed == (-signal.SIGKILL, 0)
    assert (run_in(tmp_path / "run") / "checkpoint-4").exists()
    assert run_in_process(0, ["run", "--resume", str(tmp_path / "run")])[0] == 0
    assert written(tmp_path / "run") == written(tmp_path / "whole")


# ---- checkpoints that cannot be used, and why ----------------------------------------------------


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
        return {
            path: path.read_bytes()
            for path in run.rglob("*")
            if path.is_file() and path.name != "lock"
        }

    before = files()
    assert main(["run", "--resume", str(run), *words]) == 2
    assert files() == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


OTHERS = {
    ("--method", "fedavg"): "its method is 'fedbn', not 'fedavg'",
    (
        "--method",
        "fedbn:mean-personal=true",
    ): "its method is 'fedbn', not 'fedbn:mean-personal=true'",
    ("--lr", "0.2"): "its lr is 0.1, not 0.2",
    ("--mean-personal", "true"): "its mean-personal is None, not True",
    ("--engine", "stacked"): "its engine is 'inprocess', not 'stacked'",
}


@pytest.mark.parametrize("words", OTHERS)
def test_another_run_is_refused_by_what_differs(
    words: tuple[str, str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, run, *words).startswith(
        f"fedbn-flwr: {run} cannot be resumed: {OTHERS[words]}"
    )


def test_a_run_of_a_study_that_another_process_holds_is_not_resumed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "study.json").write_text("{}")
    with (run.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"another process is running in {run.parent}" in refusal(capsys, run)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def forget_rows(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))


def lose(*keys: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        saved = part = torch.load(path, weights_only=True)
        for key in keys[:-1]:
            part = part[key]
        del part[keys[-1]]
        torch.save(saved, path)

    return change


def resize(path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    saved["model"][next(iter(saved["model"]))] = torch.zeros(3, 5)
    torch.save(saved, path)


def change_version(name: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content["versions"][name] = "7.0"
        path.write_text(json.dumps(content))

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (f"{LAST}/server.pt", truncate, "server.pt cannot be read: "),
    "something else": (
        f"{LAST}/server.pt",
        lambda path: shutil.copy(path.with_name("nodes") / "1.records", path),
        "server.pt cannot be read: ",
    ),
    "no file": (f"{LAST}/server.pt", Path.unlink, "server.pt cannot be read: "),
    "without a part": (
        f"{LAST}/server.pt",
        lose("standing"),
        "server.pt cannot be read: 'standing'",
    ),
    "of an older method": (
        f"{LAST}/server.pt",
        lose("strategy", "moments"),
        "wrote the checkpoint, which lacks 'moments'",
    ),
    "a node's state truncated": (
        f"{LAST}/nodes/1.records",
        truncate,
        "is damaged: nodes/1.records should have ",
    ),
    "a node's state lost": (
        f"{LAST}/nodes/0.records",
        Path.unlink,
        "is damaged: nodes/0.records should have ",
    ),
    "rows lost": ("rounds.jsonl", forget_rows, "does not have the rows of the first 2 rounds"),
    "options lost": (
        "config.json",
        Path.unlink,
        "cannot be resumed: its config.json is missing, cannot",
    ),
    "another architecture": (f"{LAST}/server.pt", resize, "is ((3, 5), 'float32'), not "),
    "another version": (
        "config.json",
        change_version("fedbn-flwr"),
        "its version of fedbn-flwr is '7.0', not ",
    ),
    "another torch": (
        "config.json",
        change_version("torch"),
        "its version of torch is '7.0', not ",
    ),
    "all rows lost": ("rounds.jsonl", Path.unlink, "does not have the rows of the first 2 rounds"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_damaged_or_of_another_run_is_refused(
    damage: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change, said = DAMAGES[damage]
    change(run / name)
    assert said in refusal(capsys, run)


def test_torn_rows_are_made_again_and_options_that_change_no_bit_are_taken(
    run: Path, tmp_path: Path
) -> None:
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "no')
    words = [
        "--lr",
        "0.1",
        "--method",
        "fedbn",
        "--engine",
        "inprocess",
        "--timeout",
        "9",
        "--state-dir",
    ]
    assert main(["run", "--resume", str(run), *words, str(tmp_path / "states")]) == 0
    assert [
        json.loads(row)["round"] for row in (run / "rounds.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


def test_without_a_checkpoint_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, tmp_path).endswith(
        "it has no checkpoint (`checkpoint-every` makes some)"
    )
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
    # folders are listed in any order: here, a checkpoint is to be removed before half of another
    # one is
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: sorted(glob(path, pattern)))
    (tmp_path / "rounds.jsonl").touch()
    write_checkpoint(tmp_path, Checkpoint(2, {}, {}, {}), None)
    (tmp_path / leftover / "nodes").mkdir(parents=True)
    (tmp_path / leftover / "nodes" / "7.records").touch()
    write_checkpoint(tmp_path, Checkpoint(4, {}, {}, {}), None)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert read_checkpoint(tmp_path).nodes == {}
