"""The command for exchanges: time rounds of FedTAN over a growing number of workers that are far
from the server.

The workers are Ray actors of this machine. Each waits before it answers, as long as data would
travel to another machine and back. All wait at the same time, so that more workers than cores can
be timed where clients compute little.
"""

import argparse
import csv
import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.cases import Case
from benchmarks.engines import own_cluster
from fedbn_flwr import norm, state
from fedbn_flwr.experiments.engines import node_grid, open_on_cluster
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.experiments.server_side import instruction_of
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid

WORKERS, DELAYS = (1, 2, 4, 8), (0.0, 1.0, 5.0, 20.0)
CLIENTS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a table of the seconds of a round."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchanges", description=__doc__)
    parser.add_argument("--model", default="resnet20", help="[resnet20]")
    parser.add_argument("--turns", type=int, default=10, help="rounds of each delay [10]")
    parser.add_argument(
        "--results", type=Path, default=Path("exchanges.csv"), help="[exchanges.csv]"
    )
    options = parser.parse_args(arguments)
    # as many processors as workers, whatever there is
    with own_cluster(max(WORKERS)) as address, options.results.open("w", newline="") as file:
        os.environ["RAY_ADDRESS"] = address
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            [
                "model",
                "clients",
                "workers",
                "delay, ms",
                "exchanges",
                "seconds",
                "lower quartile",
                "upper quartile",
            ]
        )
        for workers in WORKERS:
            case = Case(
                options.model, "fedtan", CLIENTS, 1, device="cpu", threads=1, workers=workers
            )
            exchanges = 2 * len(norm.bn_layers(Material.of(case.experiment().config).model))
            for delay, seconds in _times(case, options.turns).items():
                low, middle, high = (
                    f"{value:.4f}" for value in quantiles(seconds, n=4, method="inclusive")
                )
                table.writerow(
                    [case.model, CLIENTS, workers, f"{delay:g}", exchanges, middle, low, high]
                )
                file.flush()
    return 0


def _times(case: Case, turns: int) -> dict[float, list[float]]:
    """Return the seconds of rounds by delay.

    The delays take turns, the first two of which do not count.
    """
    experiment, ends = case.experiment(), list[float]()
    material = Material.of(experiment.config)
    initial = state.to_record(material.model.state_dict())
    make_grid = partial(_late_grid, partial(node_grid, True, Path("unused"), "stacked", "examples"))
    with open_on_cluster(make_grid, material, layerwise=True) as grid:
        experiment.make_strategy(case.clients).start(
            grid,
            initial,
            (2 + turns) * len(DELAYS),
            train_config=instruction_of(experiment.config).to_config(always=("lr",)),
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )
    rounds = [end - begin for begin, end in pairwise(ends)]
    return {
        delay: rounds[2 * len(DELAYS) + place :: len(DELAYS)] for place, delay in enumerate(DELAYS)
    }


def _late_grid(make_grid: Any, material: Material, partitions: Sequence[int]) -> InProcessGrid:
    """Make the grid of a worker whose layer-wise steps answer late, each step by the next of the
    delays.
    """
    grid: StackedGrid = make_grid(material, partitions)
    open_step, steps = grid.open_step, count()

    def open_late(messages: Any) -> Any:
        transport, delay = open_step(messages), DELAYS[next(steps) % len(DELAYS)] / 1000
        advance: Any = transport.advance if transport else None

        def advance_late(answer: Any = None) -> Any:
            requests = advance(answer)
            time.sleep(delay)
            return requests

        if transport:
            transport.advance = advance_late  # type: ignore[method-assign]
        return transport

    grid.open_step = open_late  # type: ignore[method-assign]
    return grid


if __name__ == "__main__":
    # workers look for the grid's function in the module of this name
    from benchmarks.exchanges import main as run

    raise SystemExit(run())
