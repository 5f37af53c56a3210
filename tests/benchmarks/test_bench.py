"""The benchmark measures what it says; how long anything takes is not asserted."""

import json
import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bench
from benchmarks.bare import BareLoop
from benchmarks.cases import CLIENTS, METHODS, MODELS, Case, make_cases
from benchmarks.driver import Effort, EngineProcess, FailedError, Measured, measure
from benchmarks.memory import family, lives
from benchmarks.results import rows_of
from tests.helpers.checkout import ROOT

KEYS = {
    "engine",
    "model",
    "method",
    "clients",
    "local-steps",
    "batch-size",
    "seconds-per-round",
    "spread",
    "ratio",
    "peak-memory-mb",
}
TINY = Case("mlp", "fedavg", clients=2, local_steps=1, device="cpu")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "default_threads", lambda: 1)


@pytest.mark.usefixtures("one_thread")
def test_a_tiny_benchmark(tmp_path: Path) -> None:
    words = "--engines bare,sequential,stacked --models mlp --methods fixbn:freeze-round=1 --clients 2 --device cpu"
    assert bench.main([*words.split(), "--repetitions", "1", "--seconds", "0.01", "--results-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [row["engine"] for row in rows] == ["bare", "sequential", "stacked"]
    assert {row["method"] for row in rows} == {"fixbn:freeze-round=1"}
    for row in rows:
        assert row.keys() >= KEYS
        assert row["seconds-per-round"] > 0
        assert row["peak-memory-mb"] > 1
        assert row["repetitions"] == 1
        assert (row["ratio"] == 1) or row["engine"] != "bare"
    assert {"processor", "cores", "versions", "effort"} <= json.loads(
        (tmp_path / "bench-machine.json").read_text()
    ).keys()
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_a_failure_is_a_row_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    # only the bare loop does not need the method's strategy
    case = Case("mlp", "fedavg:robust=nonsense", clients=2, local_steps=1, device="cpu")
    with EngineProcess("bare", 1, [case]) as bare, EngineProcess("sequential", 1, [case]) as sequential:
        results = measure(case, [bare, sequential], Effort(1, 0.01, 1))
    good, bad = rows_of(case, results)
    assert good["ratio"] == 1
    assert (bad["engine"], bad["ratio"], bad["seconds-per-round"]) == ("sequential", None, None)
    assert "unknown robust rule" in bad["error"]


def test_a_process_plays_several_cases_and_ends_with_its_driver() -> None:
    before, children = set(family(os.getpid())), set(multiprocessing.active_children())
    with EngineProcess("bare", 1, [TINY, TINY]) as process:
        for _ in range(2):
            process.ready()
            assert len(process.run(3)) == 3
            assert process.end()["flops-per-round"] > 0
        with pytest.raises(FailedError, match="has ended"):
            process.ready()
    deserted = EngineProcess("bare", 1, [TINY])
    deserted.ready()
    deserted.close()
    assert set(multiprocessing.active_children()) <= children
    # what is left serves the next test: the process from which others are forked
    assert len(set(family(os.getpid())) - before) <= 2


def test_bare_loop_is_federated_averaging() -> None:
    # a batch of everything: the mean of the clients' steps, by examples, is one step on all samples
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(7, 3, generator=generator), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, generator=generator))
    expected = model.weight.detach().clone().requires_grad_()
    bias = model.bias.detach().clone()
    nn.functional.cross_entropy(inputs @ expected.T + bias, labels).backward()
    assert expected.grad is not None
    parts = [torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5, 6])]
    loop = BareLoop(model, (inputs, labels), parts, local_steps=1, batch_size=7, lr=0.5)
    loop.round()
    torch.testing.assert_close(loop.state()["weight"], expected.detach() - 0.5 * expected.grad)
    # forward and gradient of the weight: two products of 2 x 3 x 3 multiplications and as many additions
    assert loop.flops() == 2 * (2 * 3 * 3 * 2) * 2


def test_bare_loop_freezes_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1] * 4)
    loop = BareLoop(model, data, [torch.arange(8)], local_steps=3, batch_size=4, lr=0.1, freeze_after=1)
    states = []
    for _ in range(3):
        states.append(loop.state())
        loop.round()
    assert not torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])
    torch.testing.assert_close(states[1]["1.running_mean"], states[2]["1.running_mean"])
    assert states[1]["1.num_batches_tracked"] == states[2]["1.num_batches_tracked"] == 3
    assert not torch.equal(states[1]["1.weight"], states[2]["1.weight"])


def test_effort() -> None:
    effort = Effort(repetitions=5, seconds=10.0, most_rounds=20)
    assert [(effort.rounds(seconds), effort.turns(seconds)) for seconds in (0.001, 0.5, 3.0, 60.0)] == [
        (20, 5),
        (4, 5),
        (1, 3),
        (1, 1),
    ]


def test_ratios_are_those_of_turns() -> None:
    # the second turn was slow for everybody; 4 / 2, 12 / 6 and 6 / 2
    fast = Measured("bare", 1, turns=[[2.0, 2.0], [6.0], [2.0]], notes={"flops-per-round": 8e12})
    slow = Measured("bare", 2, turns=[[9.0]])
    other = Measured("stacked", 1, turns=[[4.0], [12.0, 12.0, 12.0], [6.0]])
    one, two = Measured("sequential", 1, turns=[[3.0]] * 3), Measured("sequential", 2, turns=[[2.5]] * 3)
    failed = Measured("sequential", 3, error="no")
    bare, sequential, stacked = rows_of(TINY, [one, slow, fast, failed, two, other], peak_tflops=8.0)
    assert bare["threads"] == 1
    assert bare["seconds-by-threads"] == {"1": 2.0, "2": 9.0}
    assert (sequential["threads"], sequential["ratio"]) == (2, 1.25)
    assert sequential["seconds-by-threads"] == {"1": 3.0, "2": 2.5}
    assert stacked["seconds-per-round"] == 6.0
    assert "seconds-by-threads" not in stacked
    assert (stacked["ratio"], stacked["ratio-range"]) == (2.0, [2.0, 3.0])
    # 8 teraflop in 2 s, and in 6 s, of 8 teraflop a second
    assert (bare["share-of-peak"], stacked["share-of-peak"]) == pytest.approx((1 / 2, 1 / 6))


def test_cases() -> None:
    cases = make_cases(MODELS, METHODS, CLIENTS, "auto")
    assert len(set(cases)) == len(cases) == len(MODELS) * (len(METHODS) * len(CLIENTS) + 2)
    assert {case.local_steps for case in cases if case.clients > 10} == {5}
    for case in cases:
        assert case.experiment().config.dataset == case.dataset
        assert (case.experiment().strategy == "fixbn") == case.freezes


def test_memory() -> None:
    held = "bytearray(os.urandom(2**20)) * 64"  # in a fresh process: tests before this one had more, and gave it back
    program = (
        f"import os; from benchmarks.memory import *; print(peak_megabytes()); x = {held}; print(peak_megabytes())"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before, after = map(float, shown.split())
    assert 60 < after - before < 80


def test_processes() -> None:
    assert family(os.getpid())[0] == os.getpid()
    assert lives(os.getpid())


def test_commands_of_the_page_are_understood() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("python -m benchmarks.bench")]
    assert commands
    for command in commands:
        bench._parser().parse_args(shlex.split(command, comments=True)[3:])
