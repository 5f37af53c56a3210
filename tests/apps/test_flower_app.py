"""The root as a Flower app: `flwr run` from a fresh clone, in Flower's Ray simulation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.checkpoint import checkpoint_round
from tests.helpers.checkout import copy_checkout
from tests.helpers.flower_command import FlowerCommand, flower_command
from tests.helpers.processes import command_of, is_alive, kill, processes_with
from tests.helpers.runs import results
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("app") / "fedbn-flwr")


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerCommand]:
    with flower_command(tmp_path_factory.mktemp("flower") / "home") as flower:
        yield flower


def test_flwr_run_leaves_the_results_of_the_console_command(
    app: Path, flower: FlowerCommand, tmp_path: Path
) -> None:
    there, here = tmp_path / "flower", tmp_path / "here"
    options = {"method": "fedbn", "rounds": 2, "evaluate-every": 2, "threads": 1}
    shown, status = flower.run(app, **options, results_dir=str(there))
    assert status == "finished:completed", shown
    assert f"Results: {there}" in shown
    # Flower's default federation has two nodes
    same = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    here_only = ["--engine", "inprocess", "--clients", "2", "--results-dir", str(here)]
    assert main(["run", *same, *here_only]) == 0
    assert results(there) == results(here)


def test_five_nodes_and_a_relative_folder(app: Path, flower: FlowerCommand) -> None:
    shown, status = flower.run(
        app,
        "--federation-config",
        "num-supernodes=5 client-resources-num-cpus=1",
        method="fixbn",
        freeze_round=1,
        partition="classes:2",
        rounds=2,
    )
    assert status == "finished:completed", shown
    # relative to where the SuperLink was started
    assert f"Results: {flower.home / 'results'}" in shown
    assert results(flower.home / "results")["summary"]["clients"] == 5


def test_fedtan_trains_on_our_workers_with_the_bits_of_the_command(
    app: Path, flower: FlowerCommand, tmp_path: Path
) -> None:
    there, here = tmp_path / "flower", tmp_path / "here"
    options = {
        "method": "fedtan",
        "model": "resnet20",
        "rounds": 2,
        "evaluate-every": 2,
        "threads": 1,
        "workers": 2,
    }
    shown, status = flower.run(app, **options, results_dir=str(there))
    assert status == "finished:completed", shown
    assert "Engine stacked, the default with exchanges at every BN layer: " in shown
    assert "Round 2 of 2: train-loss" in shown
    same = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    assert main(["run", *same, "--clients", "2", "--results-dir", str(here)]) == 0
    assert results(there) == results(here)
    assert wait_until(lambda: not workers(flower))


# ---- what is left behind -------------------------------------------------------------------------


def workers(flower: FlowerCommand) -> list[int]:
    """Return our worker processes, those that they are forked from, and those that watch over
    them.
    """
    return [
        process
        for process in processes_with("FLWR_HOME", str(flower.home))
        if is_alive(process) and "multiprocessing" in command_of(process)
    ]


def superlink(flower: FlowerCommand) -> list[int]:
    return [
        process
        for process in processes_with("FLWR_HOME", str(flower.home))
        if "flower-superlink" in command_of(process)
    ]


@pytest.mark.parametrize("end", ["stop", "killed SuperLink", "failure"])
def test_no_worker_outlives_its_run(end: str, app: Path, tmp_path: Path) -> None:
    """The longest time is that between two heartbeats of Flower, by which a run learns that it was
    stopped.
    """
    with flower_command(tmp_path / "home") as flower:
        options = {"method": "fedtan", "rounds": 100_000, "workers": 2, "checkpoint-every": 1}
        run_id = flower.start(
            app, **options, results_dir=str(tmp_path / "run"), lr=1e30 if end == "failure" else 0.1
        )
        assert wait_until(lambda: bool(workers(flower)))
        # Flower's process ends once its Ray has started, however long that takes
        if end == "failure":
            assert flower.status(run_id) == "finished:failed"
        else:
            assert wait_until(lambda: checkpoint_round(tmp_path / "run") > 1)
        if end == "stop":
            flower("stop", run_id)
        elif end == "killed SuperLink":
            kill(superlink(flower))
        assert wait_until(lambda: not workers(flower), patience=40)
        if end != "failure":
            assert checkpoint_round(tmp_path / "run") > 1
