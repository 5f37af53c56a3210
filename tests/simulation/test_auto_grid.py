"""A cohort in several threads or processes: chosen by measurement, and equal to one of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedbn_flwr.client import training
from fedbn_flwr.experiments.engines import cohort_grid, run_in_process
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.simulation import CohortGrid, SpreadGrid
from fedbn_flwr.simulation import auto_grid as spread
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from tests.helpers.runs import OPTIONS

SMALL = {**OPTIONS, "clients": "4", "model": "small-cnn", "way": "stacked", "evaluate-every": "3"}


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The model of a short run, and the grid that was used."""
    experiment = resolve({**SMALL, **options})
    with cohort_grid(experiment, folder) as grid:
        run(grid, experiment, folder)
        return load_file(folder / "model.safetensors"), grid.chosen if isinstance(grid, SpreadGrid) else grid


@pytest.mark.parametrize("method", ["fedbn", "fedtan"])
def test_two_processes_train_as_one_does(method: str, tmp_path: Path) -> None:
    one, here = trained(tmp_path / "one", method=method, workers="1")
    two, there = trained(tmp_path / "two", method=method, workers="2")
    assert isinstance(here, CohortGrid)
    assert isinstance(there, WorkersGrid)
    run_in_process(resolve({**SMALL, "method": method}), tmp_path / "sequential")
    sequential = load_file(tmp_path / "sequential" / "model.safetensors")
    for name, value in sequential.items():
        for found in (one[name], two[name]):
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)


@dataclass
class Measurements:
    """In place of a clock: seconds that rehearsals in one thread, in several and in processes take."""

    alone: float
    threaded: float
    processes: float
    asked: list[str] = field(default_factory=list)

    def __call__(self, grid: CohortGrid | WorkersGrid, rehearse: spread.Rehearsal) -> tuple[float, int]:
        how = "processes" if isinstance(grid, WorkersGrid) else "threaded" if grid.threads else "alone"
        self.asked.append(how)
        return float(getattr(self, how)), rehearse(grid)


@pytest.mark.parametrize(
    ("method", "measured", "asked", "threads", "workers"),
    [
        ("fedbn", Measurements(9, 9, 9), "alone threaded processes", 1, 1),
        ("fedbn", Measurements(9, 8, 7.9), "alone threaded processes", 2, 1),
        ("fedtan", Measurements(9, 8, 5), "alone threaded processes", 1, 2),
        ("fedtan", Measurements(9, 4.5, 1), "alone threaded", 2, 1),
        ("fedbn", Measurements(0.01, 0, 0), "alone", 1, 1),
    ],
)
def test_what_is_measured_to_be_the_fastest_is_used(
    method: str,
    measured: Measurements,
    asked: str,
    threads: int,
    workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = replace(measured, asked=[])
    monkeypatch.setattr(spread, "_seconds", measured)
    # of 4 clients, 2 steps and 3 rounds as many rehearsals as there are rounds
    monkeypatch.setattr(spread, "WORTH_STARTING", 0.5)
    monkeypatch.setattr("fedbn_flwr.experiments.engines.count_cores", lambda: 2)
    choices, leave = list[dict[str, Any]](), SpreadGrid.__exit__

    def noting(grid: SpreadGrid, *error: Any) -> None:
        choices.append(grid.choice)
        leave(grid, *error)

    monkeypatch.setattr(SpreadGrid, "__exit__", noting)
    _, chosen = trained(tmp_path, method=method, workers="0")
    assert measured.asked == asked.split()
    assert isinstance(chosen, WorkersGrid if workers == 2 else CohortGrid)
    assert choices == [{"how": "stacked", "workers": workers, "threads": threads, "compile-seconds": 0}]


@pytest.mark.parametrize("way", ["stacked", "plain"])
@pytest.mark.parametrize("method", ["fedbn", "fedtan"])
def test_several_threads_train_as_one_does(way: str, method: str, tmp_path: Path) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    real = training.train

    def noting(*arguments: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return real(*arguments)

    experiment = resolve({**SMALL, "way": way, "workers": "1", "method": method})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train", noting)
        with cohort_grid(experiment, tmp_path / "threads") as grid:
            assert isinstance(grid, SpreadGrid)
            assert isinstance(grid.chosen, CohortGrid)
            grid.chosen.threads = before + 1
            run(grid, experiment, tmp_path / "threads")
    one, _ = trained(tmp_path / "one", way=way, workers="1", method=method)
    # FedTAN's plain clients answer messages, each by itself
    assert set(seen) == {before if (way, method) == ("plain", "fedtan") else before + 1}
    assert torch.get_num_threads() == before
    for name, value in load_file(tmp_path / "threads" / "model.safetensors").items():
        torch.testing.assert_close(value, one[name], rtol=1e-3, atol=1e-4)


def test_a_rehearsed_step_leaves_nothing_behind(tmp_path: Path) -> None:
    experiment = resolve({**SMALL, "method": "fedtan", "workers": "1", "momentum": "0.9", "momentum-state": "local"})
    rehearsed = []

    class Twice(SpreadGrid):
        def open_step(self, messages: Sequence[Message]) -> Any:
            rehearsed.append(spread._rehearse_step(self.chosen, messages))
            return super().open_step(messages)

    with cohort_grid(experiment, tmp_path / "twice") as grid:
        grid.__class__ = Twice
        run(grid, experiment, tmp_path / "twice")
    once, _ = trained(tmp_path / "once", method="fedtan", workers="1", **{"momentum": "0.9", "momentum-state": "local"})
    assert rehearsed == [4] * len(rehearsed) != []
    for name, value in load_file(tmp_path / "twice" / "model.safetensors").items():
        assert torch.equal(value, once[name])


@pytest.mark.parametrize("failing", ["threads", "processes"])
def test_what_not_all_can_do_is_not_used_however_fast(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse = CohortGrid.rehearse

    def some(grid: CohortGrid, messages: Sequence[Message]) -> list[Message]:
        return rehearse(grid, messages)[: 1 if grid.threads else None]

    if failing == "threads":
        monkeypatch.setattr(CohortGrid, "rehearse", some)
    monkeypatch.setattr(WorkersGrid, "rehearse", lambda grid, messages: [])
    for name, value in {"WORTH_STARTING": 0.0, "WORTH_THREADS": 0.0, "WORTH_HAVING": 1e-9, "_ENOUGH": 0.0}.items():
        monkeypatch.setattr(spread, name, value)
    monkeypatch.setattr("fedbn_flwr.experiments.engines.count_cores", lambda: 2)
    experiment = resolve({**SMALL, "method": "fedavg", "workers": "0"})
    with cohort_grid(experiment, tmp_path) as grid:
        run(grid, experiment, tmp_path)
        assert isinstance(grid, SpreadGrid)
        assert isinstance(grid.chosen, CohortGrid)
        assert grid.chosen.threads == (0 if failing == "threads" else 2)
        assert list(grid.measured) == (["at first"] if failing == "threads" else ["at first", "2 threads"])


def test_a_step_that_cannot_be_taken_together_is_decided_on_as_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[str](), spread._seconds

    def noting(grid: CohortGrid | WorkersGrid, rehearse: Any) -> tuple[float, int]:
        asked.append(rehearse.func.__name__)
        return real(grid, rehearse)

    monkeypatch.setattr(spread, "_seconds", noting)
    monkeypatch.setattr("fedbn_flwr.experiments.engines.count_cores", lambda: 2)
    trained(tmp_path, method="fedtan", workers="0", way="plain", rounds="2")
    assert asked == ["_rehearse_step", "_rehearse"]


def test_a_short_run_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.experiments.engines.count_cores", lambda: 2)
    monkeypatch.setattr(
        "fedbn_flwr.experiments.engines.spread_over", lambda *_, **__: pytest.fail("a process was started")
    )
    _, chosen = trained(tmp_path, workers="0")
    assert isinstance(chosen, CohortGrid)


def test_a_rehearsal_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(spread, "log", lambda level, text, *values: said.append(text % values))
    monkeypatch.setattr("fedbn_flwr.experiments.engines.count_cores", lambda: 2)
    experiment = resolve({**SMALL, "method": "fedtan", "workers": "0"})

    def fail(*_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("fedbn_flwr.simulation.stacked.grid.train_together", fail)
    with cohort_grid(experiment, tmp_path) as grid:
        run(grid, experiment, tmp_path)
    assert said[0] == "The nodes' common step failed, it is taken by messages: no such thing"
