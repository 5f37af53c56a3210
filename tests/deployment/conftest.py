"""A federation of two sites on the loopback, which all tests of a deployment share; it ends with
them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbn_flwr.deployment.cli import main
from tests.helpers.checkout import ROOT
from tests.helpers.faulty_runs import SITES, FaultyRuns
from tests.helpers.loopback import LoopbackFederation


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folders of the example's federation."""
    assert (
        main(
            [
                "provision",
                str(ROOT / "federation.example.yaml"),
                "--out",
                str(tmp_path / "federation"),
            ]
        )
        == 0
    )
    return tmp_path / "federation"


@pytest.fixture(scope="package")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackFederation]:
    federation = LoopbackFederation(tmp_path_factory.mktemp("loopback"), SITES)
    for service in federation.services.values():
        # to ask ten times a second, as the image does, takes half of the processor time of the
        # usual tests here
        service.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "1"
    with federation:
        federation.register()
        yield federation


@pytest.fixture(scope="package")
def all_faults(loopback: LoopbackFederation) -> Iterator[FaultyRuns]:
    runs = FaultyRuns(loopback)
    yield runs
    print("", "| fault | outcome | seconds |", "|---|---|---|", sep="\n")
    for fault, outcome, seconds in runs.table:
        print(f"| {fault} | {outcome} | {seconds:.0f} |")


@pytest.fixture
def faults(all_faults: FaultyRuns) -> FaultyRuns:
    """Both sites are online."""
    all_faults.restore()
    return all_faults
