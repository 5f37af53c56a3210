"""What a run's summary says of how its clients were trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import compare
from fedbn_flwr.experiments.results.rows import rows
from fedbn_flwr.experiments.results.tables import cautions
from tests.helpers.runs import DATA, run_in

RUN: dict[str, Any] = {
    "dataset": DATA,
    "model": "small-cnn",
    "partition": "iid",
    "clients": 5,
    "rounds": 1,
    "local_steps": 1,
    "device": "cpu",
    "progress": False,
}


def trained(folder: Path, method: str = "fedavg", **options: Any) -> dict[str, Any]:
    compare([method], folder=folder, **{**RUN, **options})
    summary = json.loads((run_in(folder) / "summary.json").read_text())
    return {key: value for key, value in summary.items() if "trained" in key}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "stacked, 1 process, stacks of 5"),
        ({"chunk": 2}, "stacked, 1 process, stacks of 2, clients alone"),
        ({"chunk": 1}, "stacked, 1 process, clients alone"),
        ({"workers": 2}, "stacked, 2 processes, stacks of 3, 2"),
        ({"engine": "inprocess"}, "inprocess, 1 process, clients alone"),
        ({"method": "fedtan"}, "stacked, 1 process, stacks of 5"),
        ({"method": "fedtan", "workers": 2}, "stacked, 2 processes, stacks of 3, 2"),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_a_summary_says_in_how_many_processes_and_in_which_stacks(
    options: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    assert trained(tmp_path / "out", **options) == {"trained-by": wanted}


def test_a_run_without_training_says_nothing(tmp_path: Path) -> None:
    assert trained(tmp_path / "out", "fed3r", rounds=1) == {}


def test_a_run_that_fails_says_it_too(tmp_path: Path) -> None:
    told = trained(tmp_path / "out", rounds=5, lr=1e30)
    assert told == {"trained-by": "stacked, 1 process, stacks of 5"}
    assert (
        "diverged" in json.loads((run_in(tmp_path / "out") / "summary.json").read_text())["failed"]
    )


def test_a_summary_says_why_clients_trained_alone_and_a_table_that_its_runs_differ(
    tmp_path: Path,
) -> None:
    told = trained(tmp_path / "out", "fbn")
    assert told == {
        "trained-by": "stacked, 1 process, clients alone",
        "trained-alone": ["BatchMoments does not work on stacked models"],
    }
    compare(["fbn", "fedavg"], folder=tmp_path / "both", **RUN)
    assert cautions(rows(tmp_path / "both"))[-1] == (
        "Seconds are of runs trained in different ways: stacked, 1 process, clients alone (fbn); "
        "stacked, 1 process, stacks of 5 (fedavg)."
    )
