"""The command for exchanges, on a Ray cluster of its own."""

import csv
from pathlib import Path

import pytest

from benchmarks import exchanges

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
def test_a_row_for_each_number_of_workers_and_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "WORKERS", (1, 2))
    monkeypatch.setenv("RAY_ADDRESS", "")
    path = tmp_path / "exchanges.csv"
    assert exchanges.main(["--model", "mlp", "--turns", "2", "--results", str(path)]) == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["workers"], row["delay, ms"]) for row in rows] == [
        (workers, f"{delay:g}") for workers in "12" for delay in exchanges.DELAYS
    ]
    for row in rows:
        assert float(row["lower quartile"]) <= float(row["seconds"]) <= float(row["upper quartile"])
        assert float(row["seconds"]) > int(row["exchanges"]) * float(row["delay, ms"]) / 1000
