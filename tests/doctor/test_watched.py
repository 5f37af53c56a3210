"""A watched grid says the same of a running app, changes nothing, and passes messages on."""

import gc
import logging
import random
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, Result, Strategy

from fedbn_flwr.doctor import watched
from fedbn_flwr.simulation.in_process import InProcessGrid

APPS = Path(__file__).parent / "apps"


@pytest.fixture(autouse=True)
def _apps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APPS))


def grid_of(name: str) -> InProcessGrid:
    torch.manual_seed(3)
    return InProcessGrid(import_module(name).client, 3)


def start(strategy: Strategy, grid: Grid) -> Result:
    torch.manual_seed(0)
    random.seed(0)  # strategies draw the order of nodes
    begun = ArrayRecord(import_module("common").Net().state_dict())
    return strategy.start(grid=grid, initial_arrays=begun, num_rounds=3)


def test_findings_are_logged_once_and_again_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level(logging.INFO, "flwr"):
        grid = watched(grid_of("message_api"))
        start(FedAdam(eta=1.5, beta_1=0.0, beta_2=0.0), grid)
        names = [finding.name for finding in grid.findings]
        assert names == ["negative-variance", "not-a-mean", "counters"]
        lines = [record.getMessage() for record in caplog.records]
        assert sum(line.startswith("BN: the averaged running_var") for line in lines) == 1
        del grid
        gc.collect()
        lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines[-3:]] == [
        "BN, wrong",
        "BN, wrong",
        "BN, worth knowing",
    ]


def test_a_watched_run_has_the_bits_of_one_that_is_not() -> None:
    results = [
        start(FedAvg(), grid).arrays
        for grid in (grid_of("message_api"), watched(grid_of("message_api")))
    ]
    for name, array in results[0].items():
        assert np.array_equal(array.numpy(), results[1][name].numpy()), name


def test_nothing_wrong_is_said_of_a_mean() -> None:
    grid = watched(grid_of("message_api"))
    start(FedAvg(), grid)
    assert {finding.name for finding in grid.findings} == {"counters"}
    grid = watched(grid_of("kept_by_type"))
    start(FedAvg(fraction_evaluate=0.0), grid)
    assert grid.findings == []
