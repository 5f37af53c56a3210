"""Whole runs on the device: cold processes, workers, resumed runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedbn_flwr import run
from fedbn_flwr.experiments import main
from tests.fake_accelerator.tally import environment
from tests.helpers.deaths import Death, dying
from tests.helpers.runs import command, results, rounds, run_in

COLD = """
import torch, torch.nn.functional as F
from fedbn_flwr.randomness import OwnRandomness

def drawn():
    stream = OwnRandomness(5)
    with stream.drawing():
        torch.rand(3)
    with stream.drawing():
        return F.dropout(torch.ones(12, device="fake")).tolist(), torch.rand(1).item()

assert not torch.fake.is_initialized()
first = drawn()
assert torch.fake.is_initialized()
assert drawn() == first
"""


def run_program(program: str, *words: str) -> None:
    subprocess.run([sys.executable, "-c", program, *words], env=environment(), check=True)


def test_dropout_in_a_cold_process_is_the_seeded_one() -> None:
    run_program(COLD)


RUNS = """
import sys, torch
from fedbn_flwr.experiments import main
for device, used in (("cpu", False), ("auto", True)):
    assert main([*sys.argv[1:], "--device", device, "--results-dir", device]) == 0
    assert torch.fake.is_initialized() == used
"""


def test_a_run_starts_and_notes_the_device_only_if_it_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_program(RUNS, *command("run", model="mlp"))
    noted = [json.loads((run_in(tmp_path / name) / "config.json").read_text()) for name in ("cpu", "auto")]
    assert [each["hardware"] == "simulated accelerator" for each in noted] == [False, True]


class Noting(nn.Sequential):
    """Notes of its passes on the device whether they learn, whether BN uses the batch, and how a GPU multiplies."""

    seen: ClassVar[set[tuple[bool, bool, str, str]]] = set()

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes), nn.BatchNorm1d(num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.device.type == "fake":
            cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv
            self.seen.add((torch.is_grad_enabled(), self[2].training, cuda.fp32_precision, cudnn.fp32_precision))
        output: torch.Tensor = super().forward(inputs)
        return output


@pytest.mark.parametrize("engine", ["stacked", "inprocess"])
@pytest.mark.parametrize(("precision", "wanted"), [("float32", "ieee"), ("tf32", "tf32")])
def test_all_passes_of_a_run_multiply_in_its_precision(precision: str, wanted: str, engine: str) -> None:
    """Nodes train, gather and evaluate, and so does the server of FedAvg, whose model is one for all."""
    shared: dict[str, Any] = {"device": "fake", "rounds": 2, "local_steps": 2, "clients": 2, "progress": False}
    shared |= {"data": "synthetic:n=80:test=40", "train_loss_global": True, "precision": precision, "engine": engine}
    Noting.seen.clear()
    for method, statistics in (("fedavg", "exact"), ("fedbn", "own")):
        run(method, model=Noting, statistics=statistics, **shared)
    training, gathering, evaluating = (True, True), (False, True), (False, False)
    # a stack's memory is found out by a step whose values nobody sees
    seen = Noting.seen - {(*training, "none", "tf32")}
    assert seen == {(*modes, wanted, wanted) for modes in (training, gathering, evaluating)}
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
def test_two_workers_have_the_results_of_one(method: str, tmp_path: Path) -> None:
    options = {"method": method, "model": "mlp", "device": "fake", "clients": "4"}
    for workers in "12":
        folder = str(tmp_path / workers)
        assert main(command("run", results_dir=folder, workers=workers, **options)) == 0
    one, two = (rounds(tmp_path / workers) for workers in "12")
    assert [row["train-loss"] for row in one] == pytest.approx([row["train-loss"] for row in two], rel=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
def test_nodes_of_a_worker_whose_device_fails_are_named(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"method": method, "model": "mlp", "device": "fake", "clients": "4", "workers": "2"}
    failing = Path(os.environ["FAKE_ACCELERATOR_FAILS"])
    failing.touch()
    try:
        assert main(command("run", results_dir=str(tmp_path), **options)) == 0
    finally:
        failing.unlink()
    assert [row["left-out"] for row in rounds(tmp_path)] == [[1001, 1003]] * 3
    assert results(tmp_path)["summary"]["left-out"] == {"1001": 3, "1003": 3}
    assert "2 nodes were missing in rounds" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_died_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    options = {"method": "scaffold", "model": "mlp", "device": "fake", "rounds": "5", "checkpoint_every": "2"}
    options |= {"momentum": "0.9", "momentum_state": "local"}
    with dying(0) as whole:
        assert main(command("run", results_dir=str(tmp_path / "whole"), **options)) == 0
    with dying(int(0.9 * whole.count)), pytest.raises(Death):
        main(command("run", results_dir=str(tmp_path / "run"), **options))
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@pytest.mark.parametrize("method", ["fedtan", "fixbn:freeze-round=3"])
def test_a_run_with_captured_steps_that_died_has_the_bits_of_one_without(method: str, tmp_path: Path) -> None:
    options = {"method": method, "model": "small-cnn", "device": "fake", "rounds": "5", "checkpoint_every": "2"}
    with dying(0) as whole:
        assert main(command("run", results_dir=str(tmp_path / "eager"), captured="false", **options)) == 0
    with dying(int(0.9 * whole.count)), pytest.raises(Death):
        main(command("run", results_dir=str(tmp_path / "run"), **options))
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert results(tmp_path / "run") == results(tmp_path / "eager")
