"""`--engine ray` on a Ray cluster that is already there: of two nodes, started for this test on one machine."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import main, resolve
from fedbn_flwr.experiments.engines import run_on_ray
from tests.helpers.ray_cluster import Cluster
from tests.simulation.test_parity import SHARED, assert_same_files


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


@pytest.mark.parametrize("named", [True, False], ids=["port", "no number"])
def test_a_cluster_that_is_not_there(
    named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # bound, and so nobody else's, but nobody listens
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1]) if named else "door"
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert main(["run", "--engine", "ray", "--results-dir", str(tmp_path)]) == 2
    assert f"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:{port}: " in capsys.readouterr().err


# in the usual run, test_parity.py compares bits and test_ray_faults.py joins the cluster
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_clients_run_on_all_nodes_and_leave_the_cluster_for_the_next_run(joined: Cluster, tmp_path: Path) -> None:
    options = ["--dataset", "tests.helpers.ray_cluster:digits", "--clients", "4", "--replacement", "true"]
    assert_same_files([*SHARED, *options, "--method", "fixbn:freeze-round=1", "--model", "mlp"], tmp_path)
    assert len(joined.nodes_seen()) == 2
    assert len(joined.processes("raylet")) == 2
