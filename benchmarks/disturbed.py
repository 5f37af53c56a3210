"""The command: time the stacked engine beside a process that starts and stops, run by run, the
worst one included.

On a machine whose cores are all in use, threads that work together wait for the one that has no
core. OpenMP's threads meet after each of torch's operations, thousands of times a round; worker
processes meet once a round. `--threads 2 --workers 1` shows the first, the engine's own choice (one
thread in each process) the second.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from benchmarks.cases import Case
from benchmarks.driver import Effort, EngineProcess, FailedError, measure
from benchmarks.results import BARE

#: of one engine in one run
EFFORT = Effort(repetitions=5, seconds=2.5, most_rounds=10)
#: works for a while, rests for a while, and imports what takes a second: what a shell script or a
#: test suite does
DISTURBANCE = """
import subprocess, sys, time
while True:
    subprocess.run([sys.executable, "-c", "import torch"])
    end = time.monotonic() + 0.5
    while time.monotonic() < end: pass
    time.sleep(0.3)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Time run after run, each of new processes, and show the ratios from the best to the worst."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disturbed", description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="[30]")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process [1]")
    parser.add_argument(
        "--workers", type=int, default=0, help="worker processes; 0: as the engine chooses [0]"
    )
    options = parser.parse_args(arguments)
    case = Case("small-cnn", "fedavg", 10, device="cpu", workers=options.workers)
    ratios, slowest = list[float](), 0.0
    for number in range(options.runs):
        engines = EngineProcess(BARE, 1, [case]), EngineProcess("stacked", options.threads, [case])
        with disturbance(), engines[0], engines[1]:
            results = measure(case, engines, EFFORT)
        if error := next((each.error for each in results if each.error), ""):
            raise FailedError(error)
        plain, engine = ([seconds for turn in each.turns for seconds in turn] for each in results)
        ratios.append(median(engine) / median(plain))
        slowest = max(slowest, max(engine) / median(plain))
        print(
            f"run {number + 1}: {median(engine):.4f} s a round, {ratios[-1]:.2f} of the bare loop",
            flush=True,
        )
    print("ratios, sorted:", ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios)))
    print(f"median {median(ratios):.2f}, worst run {max(ratios):.2f}", end=", ")
    print(f"slowest round {slowest:.2f} of the bare loop's median")
    return 0


@contextmanager
def disturbance() -> Iterator[None]:
    """Let another process work, rest and start further ones, inside the block."""
    process = subprocess.Popen([sys.executable, "-c", DISTURBANCE])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
