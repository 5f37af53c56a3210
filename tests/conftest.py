"""What every test can rely on."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.processes import kill_processes, wait_for_end

# tests run side by side, one a core, and compare bits
torch.set_num_threads(1)

# how long an example takes tells how busy the machine is, and is no reason to fail
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")

#: in the environment of whatever a test starts
MARK = "FEDBN_FLWR_TEST"


@pytest.fixture
def nothing_left_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Ray's processes have ended when a run is over, and the environment is as before."""
    monkeypatch.setenv(MARK, str(tmp_path))
    # Flower puts `sys.path` there for Ray's workers
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    ended = wait_for_end(MARK, str(tmp_path))
    kill_processes(MARK, str(tmp_path))
    assert ended, "Ray left processes behind"


@pytest.fixture
def flower_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Flower logs, and this project with it: Flower's logger does not pass on to the root logger."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def pytest_collection_finish() -> None:
    """Take what thousands of collected tests consist of out of what Python looks through for garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it is garbage, or libraries complain of what they find left."""
    gc.unfreeze()
