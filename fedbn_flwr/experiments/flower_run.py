"""What `flwr run` starts: a run with the options of Flower's run configuration, on Flower's nodes
or on our workers.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.experiments.checks import refuse_own_nodes, refuse_sites
from fedbn_flwr.experiments.config import ResultsOptions
from fedbn_flwr.experiments.engines import ENGINES, run_with_grid
from fedbn_flwr.experiments.experiment import ANEW, ENGINE, REUSE, Experiment, resolve
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.output.run_folder import read_config
from fedbn_flwr.experiments.results.plots import draw_or_warn, plot_curves
from fedbn_flwr.experiments.results.rows import rows
from fedbn_flwr.experiments.runs import Run, alone_in, asked_of, has_results, settle
from fedbn_flwr.experiments.server_side import count_nodes, run_on_grid
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError, convert, refusing
from fedbn_flwr.server.grids import is_simulated, wait_for_all
from fedbn_flwr.server.packing_grid import PackingGrid
from fedbn_flwr.server.site_names import sites_by_name
from fedbn_flwr.strategies import Layerwise
from fedbn_flwr.transports.side_channel_grid import SideChannelGrid, SideChannelOptions

#: where a deployment's server keeps the results of its runs, each in a folder of the run's number
RESULTS_VARIABLE = "FEDBN_FLWR_RESULTS"
#: samples that stand behind the statistics of a layer-wise step, at least: remark 4 of FedTAN's
#: paper
LEAST_BATCH = 32
#: the engine by the method, the name of a deployment's nodes, which is no choice, and the engines
#: with our workers
AUTO = "auto"
DEPLOYED = "flower"
OWN = ("stacked", "inprocess")


def serve(grid: Grid, run_config: Mapping[str, Any], run_id: int = 0) -> Summary:
    """Run what a Flower run configuration says, and log where the results are.

    The folder is kept: a finished run of these options is not repeated, an unfinished one goes on
    after its last checkpoint, and a folder with another run is refused: give another results-dir.
    Results that were made with code of a user's own are taken with `reuse`, and set aside with
    `anew`.

    A relative `results-dir` is relative to where the SuperLink was started: Flower does not tell
    where `flwr run` was. Where `FEDBN_FLWR_RESULTS` names a folder, results go to `run_id` in it,
    and `results-dir` counts for nothing; `resume` is then the number of a run.
    """
    experiment = resolve(run_config, federation=True)
    config = experiment.config
    if (
        issubclass(experiment.strategy_class, Layerwise)
        and config.training.batch_size < LEAST_BATCH
    ):
        # the statistics of few samples leave the sites, from which an attacker may reconstruct
        # these samples
        text = (
            "%s sends BN statistics of mini-batches (batch-size=%d); FedTAN's authors advise at "
            "least %d samples (remark 4)"
        )
        log(WARNING, text, experiment.strategy, config.training.batch_size, LEAST_BATCH)
    folder = results_folder(config.results, run_id)
    engine = choose_engine(grid, str(run_config.get(ENGINE) or AUTO), experiment, folder)
    if config.results.resume and RESULTS_VARIABLE in os.environ:
        folder.with_name(str(run_id)).symlink_to(folder.name)
    experiment = replace(experiment, asked=asked_of(experiment, engine))
    if is_simulated(grid):
        wait_for_all(grid)
        experiment = replace(experiment, config=replace(config, clients=count_nodes(grid, config)))

    def train(experiment: Experiment, folder: Path, _: Progress | None) -> Summary:
        if engine in OWN:
            return run_with_grid(engine, experiment, folder)
        return run_on_grid(
            with_side_channel(PackingGrid(sites), experiment), experiment, folder, engine=engine
        )

    reuse = bool(config.results.resume) or convert(REUSE, run_config.get(REUSE) or False, bool)
    anew = convert(ANEW, run_config.get(ANEW) or False, bool)
    one = Run(experiment, engine, folder)
    with alone_in(folder), sites_by_name(grid, config.network.sites) as sites:
        settle([one], reuse, anew)
        summary = one.train(train)
        if not (folder / "curves.png").exists():
            draw_or_warn(lambda: plot_curves(rows(folder)), folder / "curves.png")
    log(INFO, "Results: %s", folder)
    return summary


def choose_engine(grid: Grid, given: str, experiment: Experiment, folder: Path) -> str:
    """Return the engine of a run, and log why: the given one, that of the run in the folder, or the
    method's.
    """
    if given not in (AUTO, *ENGINES):
        raise UsageError(f"unknown engine {given!r}; {did_you_mean(given, (AUTO, *ENGINES))}")
    if not is_simulated(grid):
        if given != AUTO:
            raise UsageError(
                f"engine={given!r} is for simulations: the nodes of a deployment are reached by "
                "Flower's messages, or by the side channel; leave engine out"
            )
        refuse_own_nodes(experiment.config.engine)
        return DEPLOYED
    refuse_sites(experiment.config.network)
    before = None
    if has_results(folder):
        before = read_config(folder).get("asked", {}).get("engine")
    cluster = os.environ.get("RAY_ADDRESS")
    if given != AUTO:
        engine = given
        why = "as asked for"
    elif before:
        engine = before
        why = "as the run began"
    elif cluster:
        engine = "ray"
        why = "the default with RAY_ADDRESS"
    elif issubclass(experiment.strategy_class, Layerwise):
        engine = "stacked"
        why = "the default with exchanges at every BN layer"
    else:
        engine = "ray"
        why = "the default without exchanges at every BN layer"
    if engine == "stacked" and cluster:
        raise UsageError(
            f"engine='stacked' with RAY_ADDRESS={cluster}: Flower's own Ray takes that cluster's "
            "processors; use `fedbn-flwr run`, or engine='ray'"
        )
    if engine in OWN:
        trained = (
            "worker processes of this package train the nodes, and client-resources do not apply"
        )
        log(INFO, "Engine %s, %s: %s; engine='ray' is Flower's simulation", engine, why, trained)
    else:
        refuse_own_nodes(experiment.config.engine)
        log(
            INFO,
            "Engine %s, %s: Flower's simulation trains the nodes; engine='stacked' is faster",
            engine,
            why,
        )
    return engine


def results_folder(options: ResultsOptions, run_id: int) -> Path:
    """Return where the results of a run go.

    The folder of a run that goes on with another one is that one's.
    """
    kept = os.environ.get(RESULTS_VARIABLE)
    if not kept:
        return Path(options.resume or options.results_dir).expanduser().resolve()
    if options.resume and not (options.resume.isdecimal() and Path(kept, options.resume).is_dir()):
        raise UsageError(
            f"resume must be the number of a run with results on the server, got {options.resume!r}"
        )
    return Path(kept, options.resume or str(run_id))


def with_side_channel(grid: Grid, experiment: Experiment) -> Grid:
    """Return the grid with a side channel for the exchanges of layer-wise steps, if the run is to
    have one.
    """
    config = experiment.config
    if not issubclass(experiment.strategy_class, Layerwise):
        return grid
    with refusing():
        options = SideChannelOptions.of(
            config.network.exchange_port,
            config.network.exchange_address,
            config.network.connect_timeout,
        )
    if options is None:
        return grid
    return SideChannelGrid(grid, options)
