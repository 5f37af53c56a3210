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
from fedbn_flwr.server.grids import end_with_superlink, is_simulated, wait_for_all
from fedbn_flwr.simulation.in_process import InProcessGrid, RunConfig
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import preload
from fedbn_flwr.simulation.stacked.grid import StackedGrid
from fedbn_flwr.transports import message_client


def in_workers(grid: Grid, context: Context, client_app: str, workers: int = 0) -> Grid:
    """Return a grid that trains the nodes of a simulation in worker processes; in a deployment, the grid itself.

    `grid` and `context` are the ServerApp's. `client_app` names the ClientApp as pyproject.toml does,
    "package.module:app". Each worker imports it, and runs its share of the nodes, which know their `partition-id` and
    `num-partitions`. An app of `client_app` trains in stacks. Any other app's nodes train one after another, and take
    layer-wise steps without a replay. Flower's own processes stay idle, so its `client-resources` do not apply.

    There are as many `workers` as processors by default. They end with the grid, or with the ServerApp's process.
    ValueError if there is no such app.
    """
    if not is_simulated(grid):
        return grid
    if not isinstance(import_function("ClientApp", client_app, ()), ClientApp):
        raise ValueError(f"ClientApp {client_app!r} is not a ClientApp")
    end_with_superlink()
    nodes = len(wait_for_all(grid))
    preload([__name__])
    inner = WorkersGrid(
        partial(_open, client_app, nodes, dict(context.run_config)), nodes, workers or min(count_cores(), nodes)
    )
    inner.set_run(grid.run)
    text = "%d nodes train in %d worker processes; client-resources of Flower's simulation do not apply"
    log(INFO, text, nodes, len(inner.process_ids))
    return inner


def _open(client_app: str, nodes: int, run_config: RunConfig, partitions: Sequence[int]) -> InProcessGrid:
    """Make the grid of a worker, all of whose nodes may wait in the middle of a layer-wise step."""
    message_client.MAX_STEPS = max(message_client.MAX_STEPS, len(partitions))
    app = import_function("ClientApp", client_app, ())
    return StackedGrid(app, nodes, run_config, partitions)
