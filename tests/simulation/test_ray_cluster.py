"""`--engine ray` on a Ray cluster that is already there: of two nodes, started for this test on one machine."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import main, resolve
from fedbn_flwr.experiments.engines import run_on_ray
from tests.helpers.processes import processes_with
from tests.helpers.ray_cluster import FOLDER, cluster, free_port, nodes_seen
from tests.simulation.test_parity import model_bytes, rounds

DATA = "--dataset tests.helpers.ray_cluster:digits --partition classes:4 --clients 4"
OPTIONS = f"run {DATA} --rounds 2 --model mlp --threads 1"


@pytest.fixture(autouse=True)
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # Flower puts `sys.path` there for Ray's workers
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def asked_of_flower(address: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `--engine ray` would have Flower do with this address in the environment."""
    found: list[dict[str, Any]] = []
    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("flwr.simulation.run_simulation", lambda *_, **options: found.append(options))
    with pytest.raises(IndexError):  # nothing was run, so there is no result
        run_on_ray(resolve({"clients": 3}), folder)
    return found[0]


@pytest.mark.parametrize("address", [None, "", "local", "auto"])
def test_without_an_address_a_run_has_ray_for_itself(
    address: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By itself, Ray would join whatever cluster was last started on this machine."""
    options = asked_of_flower(address, tmp_path, monkeypatch)
    assert options["num_supernodes"] == 3
    assert options["backend_config"]["init_args"] == {"address": address or "local"}


def test_the_cluster_in_the_environment_is_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = asked_of_flower(address, tmp_path, monkeypatch)
    assert options["backend_config"]["init_args"] == {"address": address}


@pytest.mark.parametrize("port", [str(free_port()), "door"], ids=["free", "no number"])
def test_a_cluster_that_is_not_there(
    port: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    assert main([*OPTIONS.split(), "--engine", "ray", "--results-dir", str(tmp_path)]) == 2
    assert f"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:{port}: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, Path]]:
    with cluster() as (address, folder):
        yield address, folder
    assert processes_with(FOLDER, str(folder)) == [], "Ray left processes behind"


@pytest.mark.parametrize("method", ["fedbn", pytest.param("scaffold:fraction-train=0.5", marks=pytest.mark.slow)])
def test_clients_run_on_all_nodes_and_give_the_bits_of_one_process(
    method: str, running: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = running
    monkeypatch.setenv("RAY_ADDRESS", address)
    for engine in ("inprocess", "ray"):
        where = ["--method", method, "--engine", engine, "--results-dir", str(tmp_path / engine)]
        assert main([*OPTIONS.split(), *where]) == 0
    assert rounds(tmp_path / "ray") == rounds(tmp_path / "inprocess")
    assert model_bytes(tmp_path / "ray") == model_bytes(tmp_path / "inprocess")
    assert len(nodes_seen(folder)) == 2
    # the run has left the cluster, for the next one
    assert len([number for number in processes_with(FOLDER, str(folder)) if _is_raylet(number)]) == 2


def _is_raylet(process: int) -> bool:
    program = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0]
    return program.endswith(b"raylet/raylet")
