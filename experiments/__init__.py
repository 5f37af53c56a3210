"""Experiments: what puts strategies, models and data together. The public import path is `fedbn_flwr.experiments`."""

from .cli import main
from .config import Config, UsageError
from .methods import Experiment, settle
from .node import client_fn
from .server import run, serve

__all__ = ["Config", "Experiment", "UsageError", "client_fn", "main", "run", "serve", "settle"]
