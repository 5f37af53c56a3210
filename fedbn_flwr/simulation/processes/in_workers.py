"""Any Flower project's simulation in worker processes: `strategy.start(grid=in_workers(grid, context, "app:app"))`."""

from collections.abc import Sequence
from functools import partial
from logging import INFO

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.device import count_cores
from fedbn_flwr.plugins import import_function
from fedbn_flwr.server.grids import is_simulated, wait_for_all
from fedbn_flwr.simulation.in_process import RunConfig
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import preload
from fedbn_flwr.simulation.stacked.grid import StackedGrid
from fedbn_flwr.transports import message_client


def in_workers(grid: Grid, context: Context, client_app: str, workers: int = 0) -> Grid:
    """Return a grid that trains the nodes of a simulation in worker processes; in a deployment, the grid itself.

    `client_app` names the ClientApp as pyproject.toml does, "package.module:app"; ValueError if there is none. Its
    nodes know their `partition-id` and `num-partitions`. An app of `client_app` trains in stacks, another's nodes one
    after another. Flower's own processes stay idle, so its `client-resources` do not apply.

    There are as many `workers` as processors by default. They end with the grid, or with the ServerApp's process.
    """
    if not is_simulated(grid):
        return grid
    if not isinstance(import_function("ClientApp", client_app, ()), ClientApp):
        raise ValueError(f"ClientApp {client_app!r} is not a ClientApp")
    nodes = len(wait_for_all(grid))
    preload([__name__])
    inner = WorkersGrid(partial(_open, client_app, nodes, dict(context.run_config)), nodes, workers or count_cores())
    inner.set_run(grid.run)
    log(INFO, "%d nodes train in worker processes %s, and client-resources do not apply", nodes, inner.process_ids)
    return inner


def _open(client_app: str, nodes: int, run_config: RunConfig, partitions: Sequence[int]) -> StackedGrid:
    # all of its nodes may wait in the middle of a layer-wise step
    message_client.MAX_STEPS = max(message_client.MAX_STEPS, len(partitions))
    return StackedGrid(import_function("ClientApp", client_app, ()), nodes, run_config, partitions)
