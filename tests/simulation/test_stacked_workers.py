"""Stacked clients, in one process or in several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr.experiments.engines import open_stacked_grid, run_in_process
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from tests.helpers.runs import OPTIONS

SMALL = {**OPTIONS, "clients": "4", "model": "small-cnn", "evaluate-every": "3"}


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the model of a short run, and the grid that was used."""
    experiment = resolve({**SMALL, **options})
    with open_stacked_grid(experiment, folder) as grid:
        run(grid, experiment, folder)
        return load_file(folder / "model.safetensors"), grid


@pytest.mark.parametrize("method", [pytest.param("fedbn", marks=pytest.mark.slow), "fedtan"])
def test_two_processes_train_as_one_does(method: str, tmp_path: Path) -> None:
    one, here = trained(tmp_path / "one", method=method, workers="1")
    two, there = trained(tmp_path / "two", method=method, workers="2")
    assert isinstance(here, StackedGrid)
    assert isinstance(there, WorkersGrid)
    run_in_process(resolve({**SMALL, "method": method}), tmp_path / "sequential")
    sequential = load_file(tmp_path / "sequential" / "model.safetensors")
    for name, value in sequential.items():
        for found in (one[name], two[name]):
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)
