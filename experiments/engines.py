"""Where an experiment runs: in this process, in several of this machine, or on Flower's Ray simulation."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.inprocess import InProcessGrid
from fedbn_flwr.suspended import STEPS
from fedbn_flwr.worker import preload
from fedbn_flwr.workers import WorkersGrid, count_cores

from .config import Config
from .journal import Progress, Summary
from .methods import Experiment
from .node import bound_client_fn
from .server import run
from .workbench import make_partition, refuse_workers, set_threads, shared_model

Engine = Callable[[Experiment, Path, Progress | None], Summary]

#: what every worker needs, and takes seconds to import: itself, optimizers, partitions and the default data set
NEEDED = (__name__, "torch._dynamo", "flwr_datasets.partitioner", "sklearn.datasets")


def run_in_process(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """One client after another in this process, or in each of `workers` processes: no Ray, no network."""
    config = experiment.config
    workers = min(config.workers or count_cores(), config.clients)
    if workers == 1:
        return run(_grid(experiment, range(config.clients)), experiment, folder, progress)
    prepare(run_in_process, config)
    with WorkersGrid(partial(_ready_grid, experiment), config.clients, workers, threads=config.threads) as grid:
        return run(grid, experiment, folder, progress)


def _grid(experiment: Experiment, partitions: Sequence[int]) -> InProcessGrid:
    """The clients of these partitions, one after another."""
    STEPS.make_room(len(partitions))
    app = client_app(bound_client_fn(experiment.to_mapping()))
    return InProcessGrid(app, experiment.config.clients, partitions=partitions)


def _ready_grid(experiment: Experiment, partitions: Sequence[int]) -> InProcessGrid:
    """The same for a new process, which loads data and model before it is asked for anything."""
    set_threads(experiment.config)
    shared_model(experiment.config)
    make_partition(experiment.config, experiment.config.clients)
    return _grid(experiment, partitions)


def run_on_ray(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """Flower's simulation engine; every client gets one processor, and all share the GPU where there is one."""
    from flwr.simulation import run_simulation

    # otherwise Ray hides the GPU from workers that reserve no part of it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

    server, summaries = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        summaries.append(run(grid, experiment, folder, progress))

    run_simulation(
        server,
        client_app(bound_client_fn(experiment.to_mapping())),
        num_supernodes=experiment.config.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return summaries[0]


def prepare(engine: Engine, config: Config) -> None:
    """Refuse workers where there are none of ours; elsewhere let them import while their run is checked."""
    if engine is run_on_ray:
        refuse_workers(config)
    elif config.workers != 1:
        preload(NEEDED)


ENGINES: dict[str, Engine] = {"inprocess": run_in_process, "ray": run_on_ray}
