"""The engines, each a function that runs cases and tells the clock when a round is done.

A peer is one more.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

# what every process needs, and takes seconds to import: once, before processes are forked
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.bare import BareLoop, CapturedLoop
from benchmarks.cases import ENDLESS, FREEZE_ROUND, Case
from benchmarks.clock import Clock, Notes
from fedbn_flwr import state
from fedbn_flwr.client.training import autocast, products
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.device import count_cores, pick_device
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.engines import open_grid
from fedbn_flwr.experiments.material import Material, set_up_process
from fedbn_flwr.experiments.server_side import instruction_of
from fedbn_flwr.simulation import WorkersGrid
from fedbn_flwr.strategies import BaseStrategy
from fedbn_flwr.transports.counting_grid import CountingGrid

Engine = Callable[[Sequence[Case], Clock], None]


def run_bare(cases: Sequence[Case], clock: Clock, make: Callable[..., BareLoop] = BareLoop) -> None:
    """Time a plain loop over clients; for FedTAN without the exchanges."""
    for case in cases:
        with clock.case():
            loop = _bare_loop(case, make)
            precise, device = instruction_of(case.experiment().config), pick_device(case.device)
            while True:
                clock.round_done()
                with autocast(precise, device), products(precise):
                    loop.round()


def run_captured(cases: Sequence[Case], clock: Clock) -> None:
    """Time the plain loop with a step in one graph."""
    run_bare(cases, clock, CapturedLoop)


def run_jax(cases: Sequence[Case], clock: Clock) -> None:
    """Time the plain loop's round as one function of JAX, on the same kind of device."""
    for case in cases:
        with clock.case():
            from benchmarks.jax_round import JaxLoop, is_on_cpu

            if is_on_cpu() and pick_device(case.device).type != "cpu":
                raise RuntimeError("JAX is installed for the CPU only")
            make = partial(JaxLoop, forward=case.model, precision=case.precision)
            loop = _bare_loop(case, make)
            while True:
                clock.round_done()
                loop.round()


def run_pfl(cases: Sequence[Case], clock: Clock) -> None:
    """Time pfl, Apple's simulator, which chooses its device by itself."""

    def make(*given: Any, **options: Any) -> BareLoop:
        # within a case, which says so where pfl is not installed
        from benchmarks.pfl_round import PflLoop

        return PflLoop(*given, **options)

    run_bare(cases, clock, make)


def run_sequential(cases: Sequence[Case], clock: Clock) -> None:
    """Time one client after another, in this process."""
    for case in cases:
        _run(case, partial(open_grid, engine="inprocess"), clock)


def run_stacked(cases: Sequence[Case], clock: Clock) -> None:
    """Time stacks of clients, in as many processes as the engine takes for a run of `cases.RUN`
    rounds.
    """
    for case in cases:
        _run(case, partial(open_grid, engine="stacked"), clock)


def run_ray(cases: Sequence[Case], clock: Clock) -> None:
    """Time Flower's simulation; it starts in ten seconds, so one serves all cases, which have the
    same clients.
    """
    import ray
    from flwr.simulation import run_simulation

    # otherwise Ray hides the GPU from workers that reserve no part of it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # Flower starts this function beside Ray, and no case can begin without
        while not ray.is_initialized():
            time.sleep(0.05)
        for case in cases:
            _run(case, lambda *_: nullcontext(grid), clock)

    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        # otherwise Ray joins whichever cluster was started last on this machine, and waits for ever
        # if it is stopped
        "init_args": {"address": "local", "log_to_driver": False, "logging_level": logging.ERROR},
    }
    run_simulation(server, _app(cases[0]), num_supernodes=cases[0].clients, backend_config=backend)


def run_actors(cases: Sequence[Case], clock: Clock) -> None:
    """Time stacks of clients in Ray actors, in a cluster that is for these cases only."""
    with own_cluster(count_cores()) as address:
        os.environ["RAY_ADDRESS"] = address
        run_stacked(cases, clock)


@contextmanager
def own_cluster(processors: int) -> Iterator[str]:
    """Start a Ray cluster of this machine, which nobody joins without its address.

    Yields the address.
    """
    from ray.cluster_utils import Cluster

    # Ray notes the address in its folder, and whatever starts Ray on this machine would join a
    # cluster that is stopped
    folder = TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    with folder as name, patch.dict(os.environ, RAY_TMPDIR=name):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": processors, "include_dashboard": False},
        )
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


ENGINES: dict[str, Engine] = {
    "bare": run_bare,
    "captured": run_captured,
    "jax": run_jax,
    "pfl": run_pfl,
    "sequential": run_sequential,
    "stacked": run_stacked,
    "actors": run_actors,
    "ray": run_ray,
}
#: whose processes start in ten seconds, and are busy even if there is nothing to do
ON_RAY = ("actors", "ray")


def serve(engine: str, threads: int, cases: Sequence[Case], driver: Connection) -> None:
    """Time cases with one engine, as the driver commands: what an engine's process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its processes
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    ENGINES[engine]([replace(case, threads=threads) for case in cases], Clock(driver))


MakeGrid = Callable[[Material, BaseStrategy, Path], AbstractContextManager[Grid]]


def _run(case: Case, make: MakeGrid, clock: Clock) -> None:
    # worker processes end after the case, which counts their memory
    with ExitStack() as stack, clock.case() as notes:
        play(case, make, stack, ENDLESS, clock.round_done, notes)


def play(
    case: Case,
    make: MakeGrid,
    stack: ExitStack,
    rounds: int,
    round_done: Callable[[], None],
    notes: Notes,
) -> None:
    """Train a case's clients for so many rounds, on a grid that the stack closes.

    Note its number of processes.
    """
    experiment = case.experiment()
    material, strategy = Material.of(experiment.config), experiment.make_strategy(case.clients)
    initial = state.to_record(material.model.state_dict())
    grid = stack.enter_context(make(material, strategy, Path("unused")))
    notes["workers"] = len(grid.process_ids) if isinstance(grid, WorkersGrid) else 1
    strategy.start(
        CountingGrid(grid),
        initial,
        rounds,
        train_config=instruction_of(experiment.config).to_config(always=("lr",)),
        evaluate_fn=lambda *_: round_done(),
    )


def _app(case: Case) -> ClientApp:
    return client_app(bound_client_fn(case.experiment().config))


def _bare_loop(case: Case, make: Callable[..., BareLoop]) -> BareLoop:
    material = Material.of(case.experiment().config)
    config, split, device = material.config, material.data.train, material.device
    set_up_process(config.engine)
    return make(
        material.model.to(device),
        split.batch(torch.arange(len(split)), device),
        [torch.from_numpy(part).to(device) for part in material.partition],
        local_steps=case.local_steps,
        batch_size=case.batch_size,
        lr=config.training.lr,
        freeze_after=FREEZE_ROUND if case.freezes else 0,
    )
