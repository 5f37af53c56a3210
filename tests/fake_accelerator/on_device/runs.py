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
from tests.helpers.checkout import ROOT
from tests.helpers.deaths import Death, dying
from tests.helpers.harness import SIZES
from tests.helpers.runs import command, results, rounds

DEVICE = os.environ.get("DEVICE", "fake")
CUDNN: Any = torch.backends.cudnn

COLD = """
import copy, torch, torch.nn.functional as F
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedAvg
from tests.clientapp import test_own_loop as own
from tests.helpers.harness import CLASSES, SIZES, Double, Federation

def loop(model, batches, lr, momentum):
    print(F.dropout(torch.ones(12, device="fake")).tolist())
    return own.plain_loop(model, batches, lr, momentum)

model = Double(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, CLASSES)))
grid = InProcessGrid(own.own_app(loop, lambda: copy.deepcopy(model), **own.COUNTED), len(SIZES))
assert not torch.fake.is_initialized()
Federation(model).run(FedAvg(), 1, grid=grid, lr=0.05)
"""


def run_program(program: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.decode()


@pytest.mark.slow
def test_dropout_of_own_loops_in_a_cold_process_is_the_seeded_one() -> None:
    first, again = run_program(COLD).splitlines(), run_program(COLD).splitlines()
    assert first == again
    assert len({*first}) == len(SIZES)


PRELOADED = """
import importlib, torch

def refuse(*_):
    raise RuntimeError("a fork could not use the device any more")

torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = torch.fake.start = refuse
from fedbn_flwr.experiments.engines import NEEDED
for name in ("fedbn_flwr.simulation.processes.worker", *NEEDED):
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_what_workers_are_forked_from_uses_no_device() -> None:
    run_program(PRELOADED)


RUNS = """
import os, sys, torch
from fedbn_flwr.experiments import main
workspace = "CUBLAS_WORKSPACE_CONFIG"
os.environ.pop(workspace, None)
for device, used in (("cpu", False), ("auto", True)):
    assert main([*sys.argv[1:], "--device", device]) == 0
    assert torch.fake.is_initialized() == used == (torch.fake._seed is not None) == (workspace in os.environ)
    assert (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory) == (0, True)
"""


@pytest.mark.slow
def test_a_run_starts_seeds_and_notes_the_device_only_if_it_uses_it(tmp_path: Path) -> None:
    run_program(RUNS, *command("run", model="mlp", results_dir=str(tmp_path)))
    noted = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/config.json"))]
    devices = {each["options"]["device"]: each["hardware"] for each in noted}
    assert [devices[name] == "simulated accelerator" for name in ("cpu", "auto")] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("engine", ["stacked", "inprocess"])
def test_a_run_repeats_its_bits_in_all_processes_unless_it_need_not(
    engine: str, workers: str, tmp_path: Path
) -> None:
    options = {
        "device": "fake",
        "model": "tests.fake_accelerator.repeating:Repeating",
        "rounds": "2",
    }
    options |= {"engine": engine, "workers": workers, "clients": "4"}
    assert main(command("run", results_dir=str(tmp_path / "on"), **options)) == 0
    assert "left-out" not in results(tmp_path / "on")["summary"]
    assert (
        main(command("run", results_dir=str(tmp_path / "off"), deterministic="false", **options))
        == 1
    )


class Noting(nn.Sequential):
    """Notes of its passes on the device whether they learn, whether BN uses the batch, and how a
    GPU multiplies.
    """

    seen: ClassVar[set[tuple[bool, bool, str, str]]] = set()

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, num_classes),
            nn.BatchNorm1d(num_classes),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.device.type == "fake":
            multiplies = torch.backends.cuda.matmul.fp32_precision, CUDNN.conv.fp32_precision
            self.seen.add((torch.is_grad_enabled(), self[2].training, *multiplies))
        output: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return output


@pytest.mark.parametrize("engine", ["stacked", "inprocess"])
@pytest.mark.parametrize(("precision", "wanted"), [("float32", "ieee"), ("tf32", "tf32")])
@pytest.mark.sampled(2)
def test_all_passes_of_a_run_multiply_in_its_precision(
    precision: str, wanted: str, engine: str
) -> None:
    """Nodes train, gather and evaluate, and so does the server of FedAvg, whose model is one for
    all.
    """
    shared: dict[str, Any] = {
        "device": "fake",
        "rounds": 2,
        "local_steps": 2,
        "clients": 2,
        "progress": False,
    }
    shared |= {
        "data": "synthetic:n=80:test=40",
        "train_loss_global": True,
        "precision": precision,
        "engine": engine,
    }
    Noting.seen.clear()
    for method, statistics in (("fedavg", "exact"), ("fedbn", "own")):
        run(method, model=Noting, statistics=statistics, **shared)
    training, gathering, evaluating = (True, True), (False, True), (False, False)
    # a stack's memory is found out by a step whose values nobody sees
    seen = Noting.seen - {(*training, "none", "tf32")}
    assert seen == {(*modes, wanted, wanted) for modes in (training, gathering, evaluating)}
    assert CUDNN.conv.fp32_precision == "tf32"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
def test_two_workers_have_the_results_of_one(method: str, tmp_path: Path) -> None:
    options = {"method": method, "model": "mlp", "device": "fake", "clients": "4"}
    for workers in "12":
        folder = str(tmp_path / workers)
        assert main(command("run", results_dir=folder, workers=workers, **options)) == 0
    one, two = (rounds(tmp_path / workers) for workers in "12")
    assert [row["train-loss"] for row in one] == pytest.approx(
        [row["train-loss"] for row in two], rel=1e-5
    )


@pytest.mark.parametrize("method", ["fedtan", "fedavg"])
@pytest.mark.slow
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
    assert "nodes missing in rounds: 2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_that_died_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    options = {
        "method": "scaffold",
        "model": "mlp",
        "device": DEVICE,
        "rounds": "5",
        "checkpoint_every": "2",
    }
    options |= {"momentum": "0.9", "momentum_state": "local"}
    with dying(0) as whole:
        assert main(command("run", results_dir=str(tmp_path / "whole"), **options)) == 0
    with dying(int(0.9 * whole.count)), pytest.raises(Death):
        main(command("run", results_dir=str(tmp_path / "run"), **options))
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@pytest.mark.parametrize("method", ["fedtan", "fixbn:freeze-round=3"])
@pytest.mark.sampled(1)
def test_a_run_with_captured_steps_that_died_has_the_bits_of_one_without(
    method: str, tmp_path: Path
) -> None:
    options = {
        "method": method,
        "model": "small-cnn",
        "device": DEVICE,
        "rounds": "5",
        "checkpoint_every": "2",
    }
    with dying(0) as whole:
        assert (
            main(command("run", results_dir=str(tmp_path / "eager"), captured="never", **options))
            == 0
        )
    with dying(int(0.9 * whole.count)), pytest.raises(Death):
        main(command("run", results_dir=str(tmp_path / "run"), **options))
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert results(tmp_path / "run") == results(tmp_path / "eager")
