"""Count what a local step and a round ask of an accelerator: kernels, copies and waits.

`make bench-kernels`.

The device is the simulated one of `tests/fake_accelerator/`, so this needs no GPU, and says nothing
of seconds. Counts are of the fourth round, when steps are captured where they can be: a step's are
the difference to a round with twice as many, a round's are without its steps. Waits are for single
numbers; a copy to the host is one more.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from fedbn_flwr import run
from tests.fake_accelerator.tally import KINDS, Tally, counting, environment

ENGINES = ("stacked", "inprocess")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedTAN": ("fedtan", {}),
    "FedTAN, carried": ("fedtan:carry=true", {}),
    "SCAFFOLD": ("scaffold", {}),
    "FedWon, clipping": ("fedwon:agc=on", {}),
    "kept Adam": ("fedavg", {"optimizer": "adam", "momentum_state": "local"}),
    "crop-flip": ("fedavg", {"augmentation": "crop-flip"}),
}


def count(method: str, engine: str, rounds: int, steps: int, **options: Any) -> Tally:
    """Return what a whole run asks of the device."""
    with tempfile.TemporaryDirectory() as folder, counting() as tally:
        shared = {
            "data": "digits",
            "partition": "classes:2",
            "batch_size": 10,  # so small that no client has a smaller last one in the counted steps
            "evaluate_every": 100,
            **options,
        }
        given = {"rounds": rounds, "local_steps": steps, "lr": 0.01, **shared}
        run(method, folder=folder, engine=engine, device="fake", progress=False, **given)
    return tally


def step_and_round(
    method: str, engine: str, clients: int = 4, steps: int = 4, **options: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by kind, what a step (one after another: of one client) and a round beside its steps
    ask.
    """
    options["clients"] = clients
    count(method, engine, 1, 1, **options)  # the first sends what stays on the device
    once, longer = (
        {kind: more.of(kind) - less.of(kind) for kind in KINDS}
        for less, more in (
            [count(method, engine, rounds, number, **options) for rounds in (3, 4)]
            for number in (steps, 2 * steps)
        )
    )
    taken = steps * (clients if engine == "inprocess" else 1)
    step = {kind: (longer[kind] - once[kind]) / taken for kind in KINDS}
    return step, {kind: once[kind] - taken * step[kind] for kind in KINDS}


def rows(models: list[str], **options: Any) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    yield [
        "case",
        "model",
        "engine",
        *(f"{kind} / step" for kind in KINDS),
        *(f"{kind} / round" for kind in KINDS),
    ]
    for model in models:
        for case, (method, others) in CASES.items():
            for engine in ENGINES:
                step, of_round = step_and_round(method, engine, model=model, **others, **options)
                yield [
                    case,
                    model,
                    engine,
                    *(f"{each[kind]:g}" for each in (step, of_round) for kind in KINDS),
                ]


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--models", default="small-cnn,resnet20", help="models [%(default)s]")
    parser.add_argument("--clients", type=int, default=4, help="clients of a round [%(default)s]")
    parser.add_argument("--steps", type=int, default=4, help="their local steps [%(default)s]")
    asked = parser.parse_args()
    table = rows(asked.models.split(","), clients=asked.clients, steps=asked.steps)
    for number, row in enumerate(table):
        print("| " + " | ".join(row) + " |", flush=True)
        if not number:
            print("|" + "---|" * len(row))


if __name__ == "__main__":
    if not hasattr(torch, "fake"):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]],
            environment(),
        )
    main()
