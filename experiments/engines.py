"""Where an experiment runs: in this process, or on Flower's Ray simulation."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.cohort import CohortGrid
from fedbn_flwr.inprocess import InProcessGrid
from fedbn_flwr.suspended import STEPS

from .config import UsageError
from .journal import Progress, Summary
from .methods import Experiment
from .node import bound_client_fn
from .server import run
from .workbench import refuse_state_dir, state_folder

Engine = Callable[[Experiment, Path, Progress | None], Summary]


def run_in_process(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """One client after another in this process: no Ray, no network."""
    config = experiment.config
    STEPS.make_room(config.clients)
    app = client_app(bound_client_fn(experiment.to_mapping()))
    grid = InProcessGrid(app, config.clients, state_dir=state_folder(config, folder))
    return run(grid, experiment, folder, progress)


def run_in_cohorts(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """Clients that share a model and an instruction train stacked in this process."""
    STEPS.make_room(experiment.config.clients)
    app = client_app(bound_client_fn(experiment.to_mapping()))
    return run(CohortGrid(app, experiment.config.clients), experiment, folder, progress)


def run_on_ray(experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
    """Flower's simulation engine; every client gets one processor, and all share the GPU where there is one.

    Of its own on this machine, or with `RAY_ADDRESS` in the environment on the cluster that is there.
    """
    refuse_state_dir(experiment.config)
    cluster = _cluster()
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
        backend_config={
            "init_args": {"address": cluster},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return summaries[0]


def _cluster() -> str:
    """The address of the Ray cluster that the environment names; `local` is one for this run only.

    Ray by itself would join whatever cluster was started last on this machine, and wait minutes for one that is not
    there.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise UsageError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
    return address


ENGINES: dict[str, Engine] = {"inprocess": run_in_process, "cohort": run_in_cohorts, "ray": run_on_ray}
