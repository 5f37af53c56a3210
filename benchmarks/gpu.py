"""Check on a GPU what the tests show without one, and measure what they cannot: `make test-gpu`, in
ten minutes.

The parts come in the order of importance, each in a process of its own and with a deadline. The
exit code is 1 if one failed, and 2 if there is no accelerator. It needs torch, this project and its
dependencies, and pytest: no make.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.bench import GPU, Bench
from benchmarks.cases import DEFAULT, FASTEST, Case, Variant
from benchmarks.engines import play
from benchmarks.results import table
from fedbn_flwr.client.captured import CapturedStep
from fedbn_flwr.device import accelerator, accelerator_name
from fedbn_flwr.experiments.engines import open_grid

ROOT = Path(__file__).parents[1]
ON_DEVICE = "tests/fake_accelerator/on_device"
#: seconds for all parts, and the least that a part is begun with
ALL, LEAST = 590.0, 5.0
PASSED, FAILED, SKIPPED = 0, 1, 3
#: what switches captured steps off
EAGER: Variant = ("float32", (("captured", "never"),))


def run_tests(*words: str) -> int:
    """Run tests of the simulated device on this one."""
    # what tests share is not needed here, and imports what may be missing
    plain = ["-q", "-rf", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts="]
    return subprocess.run([sys.executable, "-m", "pytest", *plain, *words], check=False).returncode


def train(folder: Path, **options: str) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the model and the rounds of a run in this process."""
    from fedbn_flwr.experiments import main as run
    from tests.helpers.runs import command, model_bytes, rounds

    # the rate changes in mid-run
    shared = {
        "device": "auto",
        "clients": "10",
        "rounds": "4",
        "lr_schedule": "0.1@2",
        "results_dir": str(folder),
    }
    with redirect_stdout(None):
        if code := run(command("run", **shared, **options)):
            raise SystemExit(f"{options} ended with exit code {code}")
    return model_bytes(folder), rounds(folder)


def compare(methods: Sequence[str], changes: Mapping[str, str], **options: str) -> int:
    """Train twice with each method, the second time with changed options.

    Return 1 if any bits differ.
    """
    code = PASSED
    for method in methods:
        with TemporaryDirectory() as name:
            one = train(Path(name, "1"), method=method, **options)
            other = train(Path(name, "2"), method=method, **{**options, **changes})
        print(
            f"{method}, {options}, {dict(changes)}: "
            f"{'the same bits' if one == other else 'OTHER BITS'}",
            flush=True,
        )
        code = code if one == other else FAILED
    return code


def repeat() -> int:
    """Give the same commands twice."""
    return max(
        compare(("fedavg", "fedtan"), {}, model=model) for model in ("small-cnn", "resnet20")
    )


def capture(methods: Sequence[str], engines: Sequence[str]) -> int:
    """Compare eager with captured steps.

    Return 1 also if none was replayed, or one was not captured.
    """
    code = PASSED
    for engine in engines:
        with (
            patch.object(
                CapturedStep, "replay", autospec=True, side_effect=CapturedStep.replay
            ) as replay,
            patch("fedbn_flwr.client.captured.log") as said,
        ):
            code = max(code, compare(methods, dict(EAGER[1]), model="small-cnn", engine=engine))
        print(f"{engine}: {replay.call_count} steps were replayed", *said.call_args_list, sep="\n")
        code = code if replay.call_count and not said.called else FAILED
    return code


def measure(
    seconds: float, models: Sequence[str], clients: Sequence[int], variants: Sequence[Variant]
) -> int:
    """Print seconds a round of FedAvg beside those of the bare loop, eager and captured, and of JAX
    if it is installed.

    No case begins after so many seconds.
    """
    settings = replace(
        GPU, models=models, clients=clients, variants=variants, methods=("fedavg",), seconds=0.5
    )
    settings = replace(settings, device=str(accelerator()), minutes=seconds / 60)
    print(table([]), end="", flush=True)
    with TemporaryDirectory() as name:
        bench, cases = Bench(settings, Path(name)), settings.cases()
        left = bench.measure(cases)
    errors = {(row["engine"], row["error"]) for row in bench.rows if "error" in row}
    print(f"{left} of {len(cases)} cases were not measured", *map(": ".join, errors), sep="\n")
    # JAX may be here without the card
    return FAILED if {engine for engine, _ in errors} - {"jax"} else PASSED


def last() -> int:
    """Train for fifty rounds, and say whether the device's memory grows after the tenth."""
    module, held = torch.get_device_module(accelerator()), list[int]()
    if not hasattr(module, "memory_allocated"):
        print("the device does not tell its memory")
        return SKIPPED
    case = Case("resnet20", "fedavg", 10, size=32)
    with ExitStack() as stack:
        make = partial(open_grid, engine="stacked")
        play(case, make, stack, 50, lambda: held.append(module.memory_allocated()), {})
    first, end, peak = (
        value / 2**20 for value in (held[10], held[-1], module.max_memory_allocated())
    )
    print(
        f"resnet20, 32 x 32: {first:,.1f} MiB after 10 rounds, {end:,.1f} after 50, at most "
        f"{peak:,.0f}"
    )
    return FAILED if end > first + 1 else PASSED


class Part(NamedTuple):
    """One part: its seconds at most, and what it does."""

    seconds: float
    run: Callable[[], int]
    about: str


METHODS = ("fedavg", "fedtan", "fedtan:carry=true", "fixbn:freeze-round=2", "scaffold", "fedwon")
BOTH = ("small-cnn:8", "resnet20:32")
COSTS: list[Variant] = [FASTEST, ("float32", FASTEST[1]), ("tf32", ()), DEFAULT]
PARTS = {
    "stacks": Part(60, partial(capture, ("fedavg",), ("stacked",)), "stacks are captured at all"),
    "methods": Part(
        100, partial(run_tests, f"{ON_DEVICE}/methods.py"), "every method in float64 beside the CPU"
    ),
    "repeat": Part(40, repeat, "the same command twice has the same bits"),
    "captured": Part(
        90, partial(capture, METHODS, ("stacked", "inprocess")), "captured steps have eager's bits"
    ),
    "resume": Part(
        60,
        partial(run_tests, f"{ON_DEVICE}/runs.py", "-k", "died"),
        "a resumed run has the same bits",
    ),
    "ten": Part(
        70, partial(measure, 40, BOTH, (10,), (DEFAULT, EAGER)), "seconds a round with ten clients"
    ),
    "hundred": Part(
        90, partial(measure, 40, BOTH, (100,), (DEFAULT, EAGER)), "seconds a round with a hundred"
    ),
    "costs": Part(
        50,
        partial(measure, 30, BOTH[1:], (10,), COSTS),
        "what repeated bits and IEEE convolutions cost",
    ),
    "resnet18": Part(
        60, partial(measure, 30, ("resnet18:32",), (10,), (DEFAULT, EAGER)), "a large model"
    ),
    "memory": Part(40, last, "memory after fifty rounds"),
}


def run_part(name: str, seconds: float) -> str:
    """Run a part in a process of its own; return what became of it."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    environment = {**os.environ, "DEVICE": str(accelerator()), "OMP_NUM_THREADS": "1"}
    # a session of its own, so that all of its processes can be ended
    with subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return {PASSED: "passed", SKIPPED: "skipped"}.get(process.wait(seconds), "FAILED")
        except subprocess.TimeoutExpired:
            return f"FAILED: not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and print a table of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--only", default=",".join(PARTS), help="comma-separated parts [%(default)s]"
    )
    parser.add_argument("--seconds", type=float, default=ALL, help="for all parts [%(default)g]")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.part:
        return PARTS[asked.part].run()
    if accelerator() is None:
        print("there is no accelerator here: nothing was run")
        return 2
    print(f"{accelerator_name()}, torch {torch.__version__}")
    end, ended = time.monotonic() + asked.seconds, dict[str, str]()
    for name in asked.only.split(","):
        part, begun = PARTS[name], time.monotonic()
        print(f"---- {name}: {part.about}", flush=True)
        left = min(part.seconds * asked.seconds / ALL, end - begun)
        became = run_part(name, left) if left >= LEAST else "skipped: no time is left"
        ended[name] = f"{became} | {time.monotonic() - begun:.0f}"
    print("\n| part | | s |\n|---|---|---|")
    for name, became in ended.items():
        print(f"| {name}: {PARTS[name].about} | {became} |")
    return int(any(became.startswith("FAILED") for became in ended.values()))


if __name__ == "__main__":
    raise SystemExit(main())
