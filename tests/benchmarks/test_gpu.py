"""The command for a GPU, on a CPU with a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from fedbn_flwr.client import pick_device

TINY = ["--device", "cpu", "--models", "mlp:8", "--clients", "2", "--seconds", "0.01"]


def test_every_case_is_measured_beside_the_bare_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "METHODS", ("fedavg",))
    monkeypatch.setattr(gpu, "PRECISIONS", ("float32", "bf16"))
    assert gpu.main([*TINY, "--results-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench-gpu.json").read_text())
    assert [(row["engine"], row["method"], row["precision"]) for row in rows] == [
        (engine, "fedavg", precision) for precision in ("float32", "bf16") for engine in ("bare", "stacked")
    ]
    assert all(row["seconds-per-round"] > 0 for row in rows)
    lines = (tmp_path / "bench-gpu.md").read_text().splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| mlp | 8 x 8 | 2 | fedavg | float32 | 0.")


def test_cases_that_the_time_is_too_short_for_are_counted(tmp_path: Path) -> None:
    assert gpu.main([*TINY, "--minutes", "0", "--results-dir", str(tmp_path)]) == 1
    assert "6 of 6 cases were not measured in 0 minutes." in (tmp_path / "bench-gpu.md").read_text()


def test_the_cases_of_the_page() -> None:
    cases = list(gpu.make_cases(gpu.MODELS, gpu.CLIENTS, "cpu"))
    assert len(cases) == len(set(cases)) == 5 * 2 * 6
    assert {(case.model, case.size) for case in cases} >= {("resnet18", 64), ("resnet20", 32)}
    for case in cases:
        case.experiment()


def test_a_machine_without_a_gpu_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if pick_device("auto").type != "cpu":
        pytest.skip("there is a GPU")
    assert gpu.main(["--results-dir", str(tmp_path)]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 1
