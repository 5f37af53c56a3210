"""Processes that are forked from one that has imported what they need: to import torch takes seconds."""

import os
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

from fedbn_flwr.experiments.engines import NEEDED
from tests.helpers.checkout import ROOT


def forking() -> ForkServerContext:
    """Return what starts such processes; the one that they are forked from may have been started for others before."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.process_per_message", *NEEDED])
    # it looks for modules before it is told this process's path
    with patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        forkserver.ensure_running()
    return context
