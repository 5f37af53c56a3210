"""One Ray cluster for all tests that need one: to start Ray takes longer than what they run on
it.
"""

import os
from collections.abc import Iterator

import pytest

from fedbn_flwr.simulation import in_process
from tests.helpers.processes import processes_with
from tests.helpers.ray_cluster import FOLDER, Cluster, ray_cluster


@pytest.fixture(autouse=True)
def _no_run_of_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own simulation, which other tests of this process may have used, leaves the id of
    its run behind.
    """
    if identity := vars(in_process)["TaskIdentity"]:  # before Flower 1.38 there is none
        monkeypatch.setattr(identity, "_run_id", None)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster of two nodes with one processor each."""
    with ray_cluster() as cluster:
        yield cluster
    assert processes_with(FOLDER, str(cluster.folder)) == [], "Ray left processes behind"


@pytest.fixture
def joined(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, which this process's runs join, without workers of earlier runs."""
    cluster.end_workers()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    # Flower puts `sys.path` there for Ray's workers
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return cluster
