"""Run `flwr run` and plain functions in one process, without Ray: the door to `fedbn_flwr.simulation`."""

from fedbn_flwr.simulation.in_process import InProcessGrid, run_in_process

__all__ = ["InProcessGrid", "run_in_process"]
