"""The same seed gives the same model, bit for bit, in one process and on Flower's Ray simulation.

With one torch thread on both: sums are formed in another order by several.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import main

pytestmark = pytest.mark.usefixtures("nothing_left_of_ray")

#: three clients in two workers: a node's state goes from worker to worker
SHARED = ["--clients", "3", "--partition", "classes:4", "--rounds", "3", "--evaluate-every", "2", "--threads", "1"]


@pytest.mark.parametrize(
    ("model", "method", "options"),
    [
        ("mlp", "fixbn:freeze-round=1", ["--replacement", "true"]),
        ("small-cnn", "fedbn", ["--augmentation", "crop"]),
        ("resnet20", "fedavg", ["--fraction-train", "0.7", "--momentum", "0.9"]),
    ],
)
def test_ray_gives_the_bits_of_one_process(model: str, method: str, options: list[str], tmp_path: Path) -> None:
    for engine in ("inprocess", "ray"):
        where = ["--engine", engine, "--results-dir", str(tmp_path / engine)]
        assert main(["run", "--method", method, "--model", model, *SHARED, *options, *where]) == 0
    assert rounds(tmp_path / "ray") == rounds(tmp_path / "inprocess")
    assert model_bytes(tmp_path / "ray") == model_bytes(tmp_path / "inprocess")


@pytest.mark.slow
def test_a_run_in_which_no_client_can_train_fails_on_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "ray", "--model", "mlp", "--batch-size", "1", "--results-dir", str(tmp_path)]
    assert main(["run", *SHARED, *options]) == 1
    assert "batch normalization cannot train on a mini-batch of 1 sample" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


def rounds(folder: Path) -> list[dict[str, Any]]:
    """Every round's record, less the time, and the bytes on the wire, where ids are of different lengths."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key != "seconds" and not key.startswith("wire-bytes")} for row in rows]


def model_bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
