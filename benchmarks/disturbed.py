"""The command: time the stacked engine beside a process that starts and stops, run by run, the worst one included.

On a machine whose cores are all in use, threads that work together wait for the one that has no core. OpenMP's threads
meet after each of torch's operations, thousands of times a round; worker processes meet once a round. `--threads 2
--workers 1` shows the first, the engine's own choice (one thread in each process) the second.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import Case
from benchmarks.driver import Effort, EngineProcess, FailedError, Measured, measure
from benchmarks.results import BARE

#: of one engine in one run
EFFORT = Effort(repetitions=5, seconds=2.5, most_rounds=10)
#: works for a while, rests for a while, and imports what takes a second: what a shell script or a test suite does
DISTURBANCE = """
import subprocess, sys, time
while True:
    subprocess.run([sys.executable, "-c", "import torch"])
    end = time.monotonic() + 0.5
    while time.monotonic() < end: pass
    time.sleep(0.3)
"""


@dataclass(frozen=True)
class Run:
    """The outcome of a run: medians of rounds and the slowest round of the engine, in seconds."""

    bare: float
    stacked: float
    slowest: float

    @property
    def ratio(self) -> float:
        """The engine's median round as a multiple of the bare loop's."""
        return self.stacked / self.bare


def main(arguments: Sequence[str] | None = None) -> int:
    """Time run after run, and show the ratios from the best to the worst."""
    options = _parser().parse_args(arguments)
    case = Case(options.model, options.method, options.clients, device="cpu", workers=options.workers)
    runs: list[Run] = []
    for number in range(options.runs):
        with disturbance() if options.disturb else nullcontext():
            runs.append(time_run(case, options.threads))
        print(f"run {number + 1}: {runs[-1].stacked:.4f} s a round, {runs[-1].ratio:.2f} of the bare loop", flush=True)
    ratios = sorted(run.ratio for run in runs)
    print("ratios, sorted:", ", ".join(f"{ratio:.2f}" for ratio in ratios))
    print(f"median {median(ratios):.2f}, worst run {ratios[-1]:.2f}", end=", ")
    print(f"slowest round {max(run.slowest / run.bare for run in runs):.2f} of the bare loop's median")
    return 0


def time_run(case: Case, threads: int) -> Run:
    """Time the stacked engine in turn with a bare loop, each in a new process."""
    with EngineProcess(BARE, 1, [case]) as bare, EngineProcess("stacked", threads, [case]) as stacked:
        plain, measured = measure(case, [bare, stacked], EFFORT)
    for result in (plain, measured):
        if result.error:
            raise FailedError(f"{result.engine}: {result.error}")
    return Run(_median_round(plain), _median_round(measured), max(max(turn) for turn in measured.turns))


@contextmanager
def disturbance() -> Iterator[None]:
    """Let another process work, rest and start further ones, inside the block."""
    process = subprocess.Popen([sys.executable, "-c", DISTURBANCE])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _median_round(measured: Measured) -> float:
    return median(seconds for turn in measured.turns for seconds in turn)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disturbed", description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="runs, each of new processes [30]")
    parser.add_argument("--model", default="small-cnn", help="[small-cnn]")
    parser.add_argument("--method", default="fedavg", help="[fedavg]")
    parser.add_argument("--clients", type=int, default=10, help="[10]")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process [1]")
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0: as the engine chooses [0]")
    parser.add_argument("--alone", dest="disturb", action="store_false", help="without the other process")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
