"""Experiments: what puts strategies, models and data together. The public import path is `fedbn_flwr.experiments`."""

from fedbn_flwr.experiments.cli import main
from fedbn_flwr.experiments.client_side import client_fn
from fedbn_flwr.experiments.config import Config, UsageError
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.server_side import run, serve

__all__ = ["Config", "Experiment", "UsageError", "client_fn", "main", "resolve", "run", "serve"]
