"""Experiments: what puts strategies, models and data together.

The public import path is `fedbn_flwr.experiments`.
"""

from fedbn_flwr.experiments.cli import main
from fedbn_flwr.experiments.client_side import client_fn
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.experiment import Experiment, resolve
from fedbn_flwr.experiments.flower_run import serve
from fedbn_flwr.experiments.server_side import run_on_grid
from fedbn_flwr.plugins.options import UsageError

__all__ = [
    "Config",
    "Experiment",
    "UsageError",
    "client_fn",
    "main",
    "resolve",
    "run_on_grid",
    "serve",
]
