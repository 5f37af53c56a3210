"""The root as a Flower app: `flwr run` from a fresh clone, in Flower's Ray simulation."""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedbn_flwr.experiments import main
from tests.helpers.checkout import BIN, copy_checkout, environment, run
from tests.helpers.processes import kill_processes
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.xdist_group("flower")


@dataclass(frozen=True)
class Flower:
    """Flower's command line with a home, ports and a working directory of its own."""

    app: Path
    home: Path
    env: dict[str, str]

    @classmethod
    def start(cls, folder: Path) -> "Flower":
        """Nothing runs yet: the first `flwr run` starts a local SuperLink."""
        home, ports = folder / "home", _free_ports(2)
        home.mkdir()
        env = environment(
            FLWR_HOME=str(home),
            FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(ports[0]),
            FLWR_LOCAL_CONTROL_API_PORT=str(ports[1]),
            FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
            FLWR_TELEMETRY_ENABLED="0",
            OMP_NUM_THREADS="1",
        )
        return cls(copy_checkout(folder / "fedbn-flwr"), home, env)

    def stop(self) -> None:
        """End the SuperLink, which `flwr run` leaves running, and whatever else was started here."""
        kill_processes("FLWR_HOME", str(self.home))

    def run(self, *options: str, **run_config: object) -> tuple[str, str]:
        """`flwr run`; what was shown, and the status of the run, which the exit code does not tell."""
        config = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in run_config.items())
        shown = self("run", str(self.app), "--stream", "--run-config", config, *options)
        (run_id,) = re.findall(r"Successfully started run (\d+)", shown)
        return shown, self.status(run_id)

    def status(self, run_id: str) -> str:
        """How a run ended; its log ends before its status says so."""
        seen: list[str] = []

        def finished() -> bool:
            shown = self("list", "--run-id", run_id, "--format", "json")
            seen.append(str(json.loads(shown)["runs"][0]["status"]))
            return seen[-1].startswith("finished")

        wait_until(finished)
        return seen[-1]

    def __call__(self, *arguments: str) -> str:
        return run(BIN / "flwr", *arguments, cwd=self.home, env=self.env)


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    flower = Flower.start(tmp_path_factory.mktemp("flower"))
    try:
        yield flower
    finally:
        flower.stop()


def test_flwr_run_leaves_the_results_of_the_console_command(flower: Flower, tmp_path: Path) -> None:
    there, here = tmp_path / "flower", tmp_path / "here"
    options = {"method": "fedbn", "rounds": 2, "evaluate-every": 2, "threads": 1}
    shown, status = flower.run(**options, results_dir=str(there))
    assert status == "finished:completed", shown
    assert f"Results: {there}" in shown
    # Flower's default federation has two nodes
    same = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    here_only = ["--engine", "inprocess", "--clients", "2", "--partition", "classes:5", "--results-dir", str(here)]
    assert main(["run", *same, *here_only]) == 0
    assert {path.name for path in there.iterdir()} == {path.name for path in here.iterdir()}
    assert (there / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()
    assert comparable(summary(there)) == comparable(summary(here))


@pytest.mark.slow
def test_five_nodes_and_a_relative_folder(flower: Flower) -> None:
    shown, status = flower.run(
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
    assert summary(flower.home / "results")["clients"] == 5


@pytest.mark.slow
def test_a_run_that_cannot_work_has_failed(flower: Flower) -> None:
    shown, status = flower.run(dataset="nonsense")
    assert status == "finished:failed"
    assert "unknown data set 'nonsense'; there are: digits" in shown


def summary(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "summary.json").read_text()))


def comparable(row: dict[str, object]) -> dict[str, object]:
    """Less the time, and the bytes on the wire, where ids of nodes and messages are of different lengths."""
    return {key: value for key, value in row.items() if key != "seconds" and "wire-bytes" not in key}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports
