"""What every test can rely on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import end, gone

# tests run side by side, one a core, and compare bits
torch.set_num_threads(1)

#: in the environment of whatever a test starts
MARK = "FEDBN_FLWR_TEST"


@pytest.fixture
def nothing_left_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Ray's processes have ended when a run is over, and the environment is as before."""
    monkeypatch.setenv(MARK, str(tmp_path))
    # Flower puts `sys.path` there for Ray's workers
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    left = not gone(MARK, str(tmp_path), patience=60)
    end(MARK, str(tmp_path))
    assert not left, "Ray left processes behind"
