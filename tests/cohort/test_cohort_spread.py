"""A cohort in several processes: chosen by measurement, and equal to one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experiments.engines import cohort_grid, run_in_process
from experiments.methods import settle
from experiments.server import run
from fedbn_flwr.cohort import CohortGrid, SpreadGrid, spread
from fedbn_flwr.workers import WorkersGrid
from tests.experiments.runs import OPTIONS

SMALL = {**OPTIONS, "clients": "4", "model": "small-cnn", "way": "stacked", "evaluate-every": "3"}


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The model of a short run, and the grid that was used."""
    experiment = settle({**SMALL, **options})
    with cohort_grid(experiment, folder) as grid:
        run(grid, experiment, folder)
        return load_file(folder / "model.safetensors"), grid.chosen if isinstance(grid, SpreadGrid) else grid


@pytest.mark.parametrize("method", ["fedbn", "fedtan"])
def test_two_processes_train_as_one_does(method: str, tmp_path: Path) -> None:
    one, here = trained(tmp_path / "one", method=method, workers="1")
    two, there = trained(tmp_path / "two", method=method, workers="2")
    assert isinstance(here, CohortGrid)
    assert isinstance(there, WorkersGrid)
    run_in_process(settle({**SMALL, "method": method}), tmp_path / "sequential")
    sequential = load_file(tmp_path / "sequential" / "model.safetensors")
    for name, value in sequential.items():
        for found in (one[name], two[name]):
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("faster", "wanted"), [(0.0, WorkersGrid), (1e9, CohortGrid)])
def test_processes_are_used_if_they_are_faster(
    faster: float, wanted: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(spread, "WORTH_HAVING", faster)
    monkeypatch.setattr("experiments.engines.count_cores", lambda: 2)
    _, chosen = trained(tmp_path, method="fedbn", workers="0")
    assert isinstance(chosen, wanted)


def test_a_short_run_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.engines.count_cores", lambda: 2)
    monkeypatch.setattr("experiments.engines.spread_over", lambda *_, **__: pytest.fail("a process was started"))
    _, chosen = trained(tmp_path, workers="0")
    assert isinstance(chosen, CohortGrid)
