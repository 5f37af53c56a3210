"""Grids that run the nodes of a federation on this machine: every strategy runs on them unchanged.

- `InProcessGrid` (`in_process.py`) answers one message after another, as Flower's engines do;
- `OneByOneGrid` (same file) does the same faster, for ClientApps of `client_app`;
- `StackedGrid` (`stacked/stacked_grid.py`) trains clients that share a model as one stack of
  models;
- `WorkersGrid` (`processes/process_grid.py`) shares the nodes out over processes, each with one of
  the other grids;
- `in_workers` (same file) puts it in the place of Flower's simulation, in any Flower project.
"""

from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid, run_in_process
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid, in_workers
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid

__all__ = [
    "InProcessGrid",
    "OneByOneGrid",
    "StackedGrid",
    "WorkersGrid",
    "in_workers",
    "run_in_process",
]
