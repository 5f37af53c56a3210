"""The root as a Flower app: `flwr run` from a fresh clone, in Flower's Ray simulation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbn_flwr.experiments import main
from tests.helpers.checkout import copy_checkout
from tests.helpers.flower_command import FlowerCommand, flower_command
from tests.helpers.runs import results

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("app") / "fedbn-flwr")


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerCommand]:
    with flower_command(tmp_path_factory.mktemp("flower") / "home") as flower:
        yield flower


def test_flwr_run_leaves_the_results_of_the_console_command(app: Path, flower: FlowerCommand, tmp_path: Path) -> None:
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
