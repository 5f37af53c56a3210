"""The clients of an experiment, shared out over processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import UsageError, engines, resolve, serve
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.runs import results, run


@pytest.mark.parametrize("method", ["fedbn", "fedtan"])
def test_any_number_of_workers_gives_the_same_files(method: str, tmp_path: Path) -> None:
    for workers in "13":
        folder = str(tmp_path / workers)
        assert run("run", engine="inprocess", clients="4", workers=workers, method=method, results_dir=folder) == 0
    assert results(tmp_path / "3") == results(tmp_path / "1")
    assert json.loads((tmp_path / "3" / "config.json").read_text())["options"]["workers"] == 3


@pytest.mark.parametrize(("workers", "wanted"), [("1", 0), ("0", 0), ("2", 2), ("9", 3)])
def test_workers_are_counted(workers: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Several(InProcessGrid):
        def __init__(
            self, make_grid: Any, num_nodes: int, workers: int, *, threads: int, here: bool, start: Any, average_by: str
        ) -> None:
            assert average_by == "examples"
            started.append((workers, threads, here))
            super().__init__(make_grid(range(num_nodes))._client_app, num_nodes)

        def __enter__(self) -> "Several":
            return self

        def __exit__(self, *_: object) -> None:
            started.append("closed")

    monkeypatch.setattr(engines, "WorkersGrid", Several)
    monkeypatch.setattr(engines, "preload", lambda _: None)
    assert run("run", clients="3", workers=workers, rounds="1", results_dir=str(tmp_path)) == 0
    assert started == ([(wanted, 1, True), "closed"] if wanted else [])


def test_a_worker_sees_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more workers than GPUs, they share them in turn; the first one is this process, and uses the first GPU."""
    started: list[tuple[int, dict[str, str]]] = []
    monkeypatch.setattr(engines, "visible_gpus", lambda _: ["4", "6"])
    monkeypatch.setattr(engines, "Worker", lambda index, _, variables: started.append((index, variables)))
    monkeypatch.setattr(engines, "WorkersGrid", lambda *_, start, **__: [start(index, 1) for index in (1, 2)])
    engines.spread_over(3, InProcessGrid, resolve({}).config)  # type: ignore[arg-type]
    assert started == [(1, {"CUDA_VISIBLE_DEVICES": "6"}), (2, {"CUDA_VISIBLE_DEVICES": "4"})]


def test_a_flower_app_has_the_nodes_that_there_are() -> None:
    with pytest.raises(UsageError, match="workers=2 only works"):
        serve(InProcessGrid(None, 2), {"workers": 2})  # type: ignore[arg-type]
