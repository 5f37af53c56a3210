"""A round whose messages do not fit into memory at once is read in portions."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr.experiments.engines import MakeGrid, node_grid, open_grid, spread_over
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.simulation import in_process
from tests.helpers.runs import OPTIONS


@pytest.mark.usefixtures("only_composed")
@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("sequential", "fedbn"),
        ("stacked", "scaffold"),
        ("stacked", "fedtan"),
        ("workers", "fedbn"),
        ("stacked workers", "fedtan"),
    ],
)
def test_a_round_read_in_portions_has_the_same_bits(
    engine: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = resolve({**OPTIONS, "method": method, "clients": "5", "workers": "1"})
    monkeypatch.setattr(in_process, "PORTION", 2)

    def trained(folder: Path) -> dict[str, torch.Tensor]:
        make_grid: MakeGrid = partial(node_grid, experiment, folder, "inprocess")
        if engine == "sequential":
            run(make_grid(range(5)), experiment, folder)
        elif engine == "stacked":
            with open_grid(experiment, folder, "stacked") as grid:
                run(grid, experiment, folder)
        else:
            if engine == "stacked workers":
                make_grid = partial(node_grid, experiment, folder, "stacked")
            with spread_over(2, make_grid, experiment.config) as grid:
                run(grid, experiment, folder)
        return load_file(folder / "model.safetensors")

    wanted = trained(tmp_path / "at once")
    monkeypatch.setattr(in_process, "MOST_UNPACKED", 10_000)
    found = trained(tmp_path / "in portions")
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
