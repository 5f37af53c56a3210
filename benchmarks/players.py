"""The engines, each as a function that plays cases at the pace of the driver. A peer is one more of them."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# what every process needs, and takes seconds to import: once, before processes are forked
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.bare import BareLoop
from benchmarks.cases import ENDLESS, FREEZE_ROUND, Case
from benchmarks.pace import Notes, Pace
from fedbn_flwr import state
from fedbn_flwr.client import pick_device
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.engines import cohort_grid, sequential_grid
from fedbn_flwr.experiments.method import Experiment
from fedbn_flwr.experiments.resources import fresh_model, load_data, make_partition
from fedbn_flwr.experiments.server_side import instruction_of
from fedbn_flwr.traffic.counting_grid import CountingGrid

Player = Callable[[Sequence[Case], Pace], None]


def play_bare(cases: Sequence[Case], pace: Pace) -> None:
    """A plain loop over clients; what FedTAN exchanges is left out."""
    for case in cases:
        with pace.playing() as notes:
            loop = _bare_loop(case)
            notes["flops-per-round"] = loop.flops()
            while True:
                pace.lap()
                loop.round()


def play_sequential(cases: Sequence[Case], pace: Pace) -> None:
    """One client after another, in this process."""
    for case in cases:
        _play(case, partial(_open_sequential, case.experiment()), pace)


def play_cohort(cases: Sequence[Case], pace: Pace) -> None:
    """Clients at once, in the way and in as many processes as the engine chooses."""
    for case in cases:
        with ExitStack() as stack:
            _play(case, partial(_open_cohort, stack, case.experiment()), pace)


def _open_sequential(experiment: Experiment, *_: object) -> Grid:
    return sequential_grid(experiment, Path("unused"), range(experiment.config.clients))


def _open_cohort(stack: ExitStack, experiment: Experiment, *_: object) -> Grid:
    return stack.enter_context(cohort_grid(experiment, Path("unused")))


def play_ray(cases: Sequence[Case], pace: Pace) -> None:
    """Flower's simulation; it starts in ten seconds, so that one serves several cases, whose clients are alike."""
    from flwr.simulation import run_simulation

    # otherwise Ray hides the GPU from workers that reserve no part of it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        for case in cases:
            _play(case, lambda *_: grid, pace)

    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"log_to_driver": False, "logging_level": logging.ERROR},
    }
    run_simulation(server, _app(cases[0]), num_supernodes=cases[0].clients, backend_config=backend)


PLAYERS: dict[str, Player] = {
    "bare": play_bare,
    "sequential": play_sequential,
    "cohort": play_cohort,
    "ray": play_ray,
}


def play(engine: str, threads: int, cases: Sequence[Case], driver: Connection) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its processes
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    PLAYERS[engine]([replace(case, threads=threads) for case in cases], Pace(driver))


def describe(grid: Grid) -> Notes:
    """What a grid tells of its choice: `how` it trains, in how many `threads` and `workers`; its `compile-seconds`."""
    return dict(getattr(grid, "choice", {}))


def _play(case: Case, make_grid: Callable[[ClientApp, int], Grid], pace: Pace) -> None:
    with pace.playing() as notes:
        experiment = case.experiment()
        grid = make_grid(_app(case), case.clients)
        initial = state.to_record(fresh_model(experiment.config).state_dict())
        train_config = instruction_of(experiment.config).to_config()
        strategy = experiment.make_strategy(case.clients)
        try:
            strategy.start(
                CountingGrid(grid), initial, ENDLESS, train_config=train_config, evaluate_fn=lambda *_: pace.lap()
            )
        finally:
            notes |= describe(grid)


def _app(case: Case) -> ClientApp:
    return client_app(bound_client_fn(case.experiment().to_mapping()))


def _bare_loop(case: Case) -> BareLoop:
    config = case.experiment().config
    device = pick_device(config.device)
    split = load_data(config).train
    return BareLoop(
        fresh_model(config).to(device),
        split.batch(torch.arange(len(split)), device),
        [torch.from_numpy(part).to(device) for part in make_partition(config, case.clients)],
        local_steps=case.local_steps,
        batch_size=case.batch_size,
        lr=config.lr,
        freeze_after=FREEZE_ROUND if case.freezes else 0,
    )
