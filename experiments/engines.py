"""Where an experiment runs: in this process, or on Flower's Ray simulation."""

import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.cohort import CohortGrid
from fedbn_flwr.inprocess import InProcessGrid
from fedbn_flwr.suspended import STEPS

from .journal import Progress, Summary
from .methods import Experiment
from .node import bound_client_fn
from .server import run

Engine = Callable[[Experiment, Path, Progress | None], Summary]


def run_in_process(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """One client after another in this process: no Ray, no network."""
    STEPS.make_room(experiment.config.clients)
    app = client_app(bound_client_fn(experiment.to_mapping()))
    return run(InProcessGrid(app, experiment.config.clients), experiment, folder, progress)


def run_in_cohorts(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """Clients that share a model and an instruction train stacked in this process."""
    STEPS.make_room(experiment.config.clients)
    app = client_app(bound_client_fn(experiment.to_mapping()))
    return run(CohortGrid(app, experiment.config.clients), experiment, folder, progress)


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


ENGINES: dict[str, Engine] = {"inprocess": run_in_process, "cohort": run_in_cohorts, "ray": run_on_ray}
