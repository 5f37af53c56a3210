"""What `flwr run` starts on a server: one run, from a run configuration to a folder of results."""

import os
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.kept_run import KeptRun, alone_in
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.output.recorder import Summary
from fedbn_flwr.experiments.resources import refuse_state_dir, refuse_workers
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.packing_grid import PackingGrid
from fedbn_flwr.strategies import Layerwise
from fedbn_flwr.transports.side_channel_grid import SideChannelGrid, SideChannelOptions

#: where a deployment's server keeps the results of its runs, each in a folder of the run's number
RESULTS_VARIABLE = "FEDBN_FLWR_RESULTS"
#: samples that stand behind the statistics of a layer-wise step, at least: remark 4 of FedTAN's paper
LEAST_BATCH = 32


def serve(grid: Grid, run_config: Mapping[str, Any], run_id: int = 0) -> Summary:
    """Run what a Flower run configuration says, and log where the results are.

    The folder is kept: a finished run of these options is not repeated, an unfinished one goes on after its last
    checkpoint, and a folder with another run is refused.

    A relative `results-dir` is relative to where the SuperLink was started: Flower does not tell where `flwr run` was.
    Where `FEDBN_FLWR_RESULTS` names a folder, results go to `run_id` in it, and `results-dir` counts for nothing;
    `resume` is then the number of a run.
    """
    experiment = resolve(run_config)
    refuse_state_dir(experiment.config)
    refuse_workers(experiment.config)
    warn_of_small_batches(experiment)
    folder = results_folder(experiment.config, run_id)
    kept = KeptRun.of(experiment, "flower", folder)
    with alone_in(folder):
        summary = None
        if not experiment.config.resume:
            kept.refuse_other("give another results-dir")
            summary = kept.finished()
        if summary is None:
            summary = run(with_side_channel(PackingGrid(grid), experiment), kept.resumed(), folder)
    log(INFO, "Results: %s", folder)
    return summary


def results_folder(config: Config, run_id: int) -> Path:
    """Return where the results of a run go; the folder of a run that goes on with another one is that one's."""
    kept = os.environ.get(RESULTS_VARIABLE)
    if not kept:
        return Path(config.resume or config.results_dir).expanduser().resolve()
    folder = Path(kept, str(run_id))
    if config.resume:
        if not config.resume.isdecimal() or not Path(kept, config.resume).is_dir():
            raise UsageError(f"resume must be the number of a run with results on the server, got {config.resume!r}")
        folder.symlink_to(config.resume)
    return folder


def with_side_channel(grid: Grid, experiment: Experiment) -> Grid:
    """Return the grid with a side channel for the exchanges of layer-wise steps, if the run is to have one."""
    config = experiment.config
    if not issubclass(experiment.strategy_class, Layerwise):
        return grid
    try:
        options = SideChannelOptions.of(config.exchange_port, config.exchange_address, config.connect_timeout)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return grid if options is None else SideChannelGrid(grid, options)


def warn_of_small_batches(experiment: Experiment) -> None:
    """Warn if the statistics of few samples leave the sites, from which an attacker may reconstruct these samples."""
    size = experiment.config.batch_size
    if issubclass(experiment.strategy_class, Layerwise) and size < LEAST_BATCH:
        text = (
            "%s sends the BN statistics of mini-batches of %d samples; FedTAN's authors advise at least %d (remark 4)"
        )
        log(WARNING, text, experiment.strategy, size, LEAST_BATCH)
