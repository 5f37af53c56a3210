"""Every benchmark runs a small case; how long anything takes is not asserted."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from copy import deepcopy
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import bench, deploy, driver, exchanges, gpu, image_loading
from benchmarks.bare import BareLoop
from benchmarks.cases import Case
from benchmarks.clock import Clock
from benchmarks.driver import Effort, EngineProcess, Measured, measure
from benchmarks.engines import run_pfl
from benchmarks.results import line_of, rows_of, table
from fedbn_flwr.device import settings_restored
from fedbn_flwr.models import build
from tests.helpers.checkout import ROOT
from tests.helpers.processes import MARK, is_alive, kill_processes, processes_with, wait_for_end
from tests.helpers.waiting import wait_until


@pytest.mark.slow
def test_engines_stand_beside_the_bare_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "count_cores", lambda: 1)
    words = (
        "--engines bare,stacked --models mlp --methods fixbn:freeze-round=1 --clients 2 "
        "--device cpu"
    )
    assert (
        bench.main(
            [
                *words.split(),
                "--repetitions",
                "1",
                "--seconds",
                "0.01",
                "--results-dir",
                str(tmp_path),
            ]
        )
        == 0
    )
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [(row["engine"], row["method"]) for row in rows] == [
        (engine, "fixbn:freeze-round=1") for engine in ("bare", "stacked")
    ]
    assert all(
        min(row["seconds-per-round"], row["ratio"]) > 0 and row["peak-memory-mb"] > 1
        for row in rows
    )
    assert len((tmp_path / "bench.md").read_text().splitlines()) == 4


@pytest.mark.slow
def test_an_engine_takes_no_part_in_cases_that_it_cannot_do(tmp_path: Path) -> None:
    words = (
        "--engines bare,captured,jax,pfl --models mlp --methods fixbn:freeze-round=1 --clients 2"
    )
    few = ["--device", "cpu", "--repetitions", "1", "--seconds", "0.01"]
    assert bench.main([*words.split(), *few, "--results-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [row["engine"] for row in rows] == ["bare"]


def test_a_row_says_how_it_computes_and_what_it_takes_on_a_gpu() -> None:
    case = Case("mlp", "fedavg", clients=2, precision="tf32", options=(("deterministic", "false"),))
    assert case.experiment().config.engine.deterministic is False
    measured = Measured(
        "bare", 1, turns=[[0.5]], notes={"peak-memory-mb": 1200.0, "peak-gpu-memory-mb": 70.4}
    )
    cells = [cell.strip() for cell in line_of(*rows_of(case, [measured])).split("|")]
    titles = [cell.strip() for cell in table([]).splitlines()[0].split("|")]
    row = dict(zip(titles, cells, strict=True))
    assert (row["arithmetic"], row["MiB"], row["GPU MiB"]) == (
        "tf32, deterministic=false",
        "1,200",
        "70",
    )


@pytest.mark.slow
def test_a_failure_is_a_row_and_the_others_go_on() -> None:
    # only the bare loop does not need the method's strategy
    case = Case("mlp", "fedavg:robust=nonsense", clients=2, local_steps=1, device="cpu")
    with (
        EngineProcess("bare", 1, [case]) as bare,
        EngineProcess("sequential", 1, [case]) as sequential,
    ):
        good, bad = rows_of(case, measure(case, [bare, sequential], Effort(1, 0.01, 1)))
    assert good["ratio"] == 1
    assert (bad["engine"], bad["ratio"], bad["seconds-per-round"]) == ("sequential", None, None)
    assert "unknown robust rule" in bad["error"]


def test_a_process_whose_driver_has_gone_ends_without_a_word() -> None:
    ours, theirs = Pipe()
    theirs.close()
    clock = Clock(ours)
    with pytest.raises(SystemExit), clock.case():
        clock.round_done()


def test_the_bare_loop_is_federated_averaging() -> None:
    # a batch of everything: the mean of the clients' steps, by examples, is one step on all samples
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(7, 3, generator=generator), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    model = nn.Linear(3, 2)
    weight, bias = (value.detach().clone() for value in model.parameters())
    weight.requires_grad_()
    nn.functional.cross_entropy(inputs @ weight.T + bias, labels).backward()
    assert weight.grad is not None
    parts = [torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5, 6])]
    loop = BareLoop(model, (inputs, labels), parts, local_steps=1, batch_size=7, lr=0.5)
    loop.round()
    torch.testing.assert_close(loop.state()["weight"], weight.detach() - 0.5 * weight.grad)


@pytest.mark.parametrize("model", ["small-cnn", "resnet20"])
def test_a_round_in_jax_is_the_bare_loops(model: str) -> None:
    jax = pytest.importorskip("jax")
    from benchmarks.jax_round import JaxLoop

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 3, 8, 8, generator=generator), torch.arange(40) % 10
    parts = [torch.arange(16), torch.arange(16, 40)]
    given: dict[str, Any] = {"local_steps": 3, "batch_size": 8, "lr": 0.05}
    plain = BareLoop(build(model, 10, 3, 8).double(), (data[0].double(), data[1]), parts, **given)
    with jax.enable_x64(True):
        network = build(model, 10, 3, 8).double()
        loop = JaxLoop(network, (data[0].double(), data[1]), parts, model, **given)
        for _ in range(2):
            plain.round()
            loop.round()
        for name, value in loop.state().items():
            torch.testing.assert_close(value, plain.state()[name], rtol=0, atol=1e-10)


def test_a_round_in_pfl_is_the_bare_loops_but_for_statistics() -> None:
    pytest.importorskip("pfl")
    from benchmarks.pfl_round import PflLoop

    data = (
        torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
        torch.arange(40) % 10,
    )
    parts = [torch.arange(20), torch.arange(20, 40)]
    given: dict[str, Any] = {"local_steps": 3, "batch_size": 8, "lr": 0.05}
    network = build("small-cnn", 10, 3, 8)
    plain = BareLoop(deepcopy(network), data, parts, **given)
    loop = PflLoop(network, data, parts, **given)
    for _ in range(2):
        plain.round()
        loop.round()
    expected = plain.state()
    for name, value in network.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=1e-6)


def test_a_simulator_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.pfl_round", None)
    ours, theirs = Pipe()
    with settings_restored():
        run_pfl([Case("mlp", "fedavg", clients=2)], Clock(theirs))
    kind, words = ours.recv()
    assert kind == "failed"
    assert words.startswith("ModuleNotFoundError")


def test_cases_are_experiments_and_the_pages_commands_are_understood() -> None:
    for case in (*bench.Settings().cases(), *bench.GPU.cases()):
        assert (case.experiment().strategy == "fixbn") == case.freezes
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("python -m benchmarks.bench")]
    assert commands
    for command in commands:
        bench.make_parser().parse_args(shlex.split(command, comments=True)[3:])


def test_without_an_accelerator_its_checks_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "accelerator", lambda: None)
    assert gpu.main([]) == 2
    assert capsys.readouterr().out == "there is no accelerator here: nothing was run\n"


def test_both_loaders_load_the_images_that_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_loading, "CLASSES", 3)
    image_loading.main(["make", str(tmp_path), "--images", "60", "--pixels", "24", "16"])
    image_loading.main(
        ["load", str(tmp_path), "--side", "8", "--batches", "2", "--decoders", "1", "--turns", "2"]
    )
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert {name: len(seconds) for name, seconds in turns.items()} == {"imagefolder": 2, "this": 2}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_exchanges_have_a_row_for_each_number_of_workers_and_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "WORKERS", (1, 2))
    monkeypatch.setenv("RAY_ADDRESS", "")
    path = tmp_path / "exchanges.csv"
    assert exchanges.main(["--model", "mlp", "--turns", "2", "--results", str(path)]) == 0
    with path.open() as file:
        rows = [(row["workers"], row["delay, ms"]) for row in csv.DictReader(file)]
    assert rows == [(workers, f"{delay:g}") for workers in "12" for delay in exchanges.DELAYS]


@pytest.mark.slow
def test_an_exchange_of_a_deployment_takes_time(tmp_path: Path) -> None:
    words = (
        "--transports",
        "streams",
        "--nodes",
        "2",
        "--rtt",
        "1",
        "--models",
        "small-cnn",
        "--rounds",
        "1",
    )
    assert deploy.main([*words, "--results-dir", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "bench-deploy.json").read_text())
    assert min(row["ms-per-exchange"], row["seconds-per-round"]) > 0


def test_an_engine_that_does_not_start_is_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("mlp", "fedavg", clients=2, local_steps=1, device="cpu")
    with EngineProcess("bare", 1, [case]) as bare, ExitStack() as stack:
        bare.ready()  # whose start does not count, however busy the machine is
        stopped = stack.enter_context(EngineProcess("sequential", 1, [case, case]))
        assert stopped._process.pid
        os.kill(stopped._process.pid, signal.SIGSTOP)  # long before its first case could begin
        monkeypatch.setattr(driver, "STARTING", 0.1)
        for _ in range(2):
            (row,) = rows_of(case, measure(case, [stopped], Effort(1, 0.01, 1)))
            assert row["error"] == "did not start within 0.1 s"
        assert wait_until(lambda: not is_alive(stopped._process.pid))
        assert bare.run(1)


#: starts a process that ends with its input, and stops it
STOPS = """
import os, signal, subprocess, sys
from benchmarks.orphans import end_with_this_process

end_with_this_process()
process = subprocess.Popen(["sh", "-c", f"read line; echo woken > {sys.argv[1]}"], stdin=subprocess.PIPE)
os.kill(process.pid, signal.SIGSTOP)
print("stopped", flush=True)
signal.pause()
"""


def test_a_killed_driver_leaves_no_process_behind(tmp_path: Path) -> None:
    environment = {**os.environ, MARK: str(tmp_path)}
    words = (sys.executable, "-c", STOPS, str(tmp_path / "woken"))
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout
        assert started.stdout.readline() == "stopped\n"
        # new programs have no environment yet
        seen = wait_until(lambda: len(processes_with(MARK, str(tmp_path))) > 2)
        started.kill()
    try:
        assert seen
        assert wait_for_end(MARK, str(tmp_path))
    finally:
        kill_processes(MARK, str(tmp_path))
    assert (tmp_path / "woken").exists()
