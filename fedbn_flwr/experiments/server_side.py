"""The server's side of an experiment: one run, from a grid to a folder of results."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import state
from fedbn_flwr.client import pick_device
from fedbn_flwr.data import SITES
from fedbn_flwr.experiments.checkpoint import Recovery, StopRun, clear, read_checkpoint, refuse_other_model
from fedbn_flwr.experiments.checks import check
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.data_and_model import (
    Form,
    form_of,
    fresh_model,
    load_data,
    make_partition,
    rounds_within_budget,
    set_threads,
    shared_model,
    unlabeled_inputs,
)
from fedbn_flwr.experiments.method import Experiment
from fedbn_flwr.experiments.output.recorder import Journal, Progress, Summary
from fedbn_flwr.experiments.output.run_folder import CONFIG, RunFolder, read_json
from fedbn_flwr.experiments.output.scoring import Scorer, SiteScorer
from fedbn_flwr.experiments.output.sinks import open_sinks
from fedbn_flwr.experiments.runs import Run, asked_of
from fedbn_flwr.experiments.sites.agreement import SitesGrid, agree, ask_sites
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.state import arrays_of, arrays_to_record
from fedbn_flwr.strategies import CannotTrainError, wait_for_nodes
from fedbn_flwr.traffic.counting_grid import CountingGrid
from fedbn_flwr.wire import Instruction


def run(
    grid: Grid, experiment: Experiment, folder: Path, progress: Progress | None = None, engine: str = "flower"
) -> Summary:
    """Run one experiment on a grid and write its results into a folder.

    With `resume` the folder holds a run of this experiment, which goes on after its last checkpoint. Other
    grids may stand in front of the grid of nodes. From the strategy to the nodes: CountingGrid
    (always), SitesGrid, and in a deployment SideChannelGrid, PackingGrid and SitesByName (both always, by `serve`).
    """
    check(experiment)
    asked = asked_of(experiment, engine)
    saved = read_checkpoint(folder) if experiment.config.resume else None
    if saved:
        Run(experiment, engine, folder).check()
    nodes = count_nodes(grid, experiment.config)
    task = make_task(grid, experiment.config, nodes, read_json(folder / CONFIG)["options"] if saved else {})
    experiment = replace(experiment, config=task.config)
    initial = state.to_record(fresh_model(task.config, task.form).state_dict())
    if saved:
        refuse_other_model(folder, saved, arrays_of(initial))
        files = RunFolder(folder, saved.server_round)
    else:
        clear(folder)
        files = RunFolder(folder)
        files.config(experiment.to_mapping(), asked, task.sites)
    strategy = experiment.make_strategy(nodes)
    counted = CountingGrid(task.grid)
    with open_sinks(task.config.log_to, folder, experiment.to_mapping(), files.rounds_done) as sinks:
        journal = Journal(files, strategy, counted, task.scorer, task.config, sinks, progress)
        recovery = Recovery(folder, experiment, task.grid, strategy, journal)
        arrays = recovery.restore(saved) if saved else initial
        try:
            strategy.start(
                counted,
                arrays,
                task.config.rounds,
                rounds_done=files.rounds_done,
                timeout=task.config.timeout,
                train_config=recovery.tell(
                    ConfigRecord({**instruction_of(task.config).to_config(always=("lr",)), **task.facts})
                ),
                evaluate_config=recovery.tell(ConfigRecord({**evaluation_of(experiment).to_config(), **task.facts})),
                evaluate_fn=recovery.record,
            )
        except StopRun:
            log(INFO, "The run ends early: %s", journal.stopped_by)
        except OSError:  # the disk, and no fault of the run: it can go on
            raise
        except Exception as error:
            summary = journal.summary_of_failure(experiment, nodes, error)
            files.finish(summary, journal.arrays)
            log(ERROR, "The run ended after round %d, what it leaves is in %s", summary["rounds-done"], folder)
            raise
    summary, arrays = journal.summary(experiment, nodes), journal.arrays or arrays
    recovery.save_personal(arrays)
    # what is kept of entries that stay on the nodes is their mean after the last round
    arrays = arrays_to_record({**arrays_of(arrays), **strategy.state.personal})
    files.finish(summary, arrays)
    return summary


@dataclass(frozen=True)
class Task:
    """A run's options with what its data decide, the nodes that have data for it, and who scores its models."""

    config: Config
    grid: Grid
    #: what a model must know of the data
    form: Form
    scorer: Scorer | SiteScorer
    #: what every message tells a node of the data
    facts: ConfigRecord
    #: a row about each site's data
    sites: list[dict[str, Any]]


def make_task(grid: Grid, config: Config, nodes: int, before: Mapping[str, Any]) -> Task:
    """Return the task of a run; `before` are the options of the run that goes on, if there is one."""
    if config.dataset == SITES:
        return _at_sites(grid, config, nodes, before)
    make_partition(config, nodes)  # said before anything is made of it
    config = rounds_within_budget(config, nodes)
    set_threads(config)
    trained = np.concatenate(make_partition(config, nodes)) if config.train_loss_global else None
    device = pick_device(config.device)
    about = trained, config.class_metrics, config.objective, unlabeled_inputs(config, device)
    scorer = Scorer(shared_model(config), load_data(config), device, *about)
    return Task(config, grid, form_of(config), scorer, ConfigRecord(), [])


def _at_sites(grid: Grid, config: Config, nodes: int, before: Mapping[str, Any]) -> Task:
    """Ask the sites what their data are, and agree on what they have in common."""
    if before and not config.mean:
        # what the sites agreed on then: today another one may be absent
        config = Config.from_mapping({**config.to_mapping(), "mean": before["mean"], "std": before["std"]})
    answers = ask_sites(grid, sorted(grid.get_node_ids()), config.node_timeout)
    agreement = agree(replace(config, partition=SITES), answers)
    config = rounds_within_budget(agreement.config, nodes, agreement.samples)
    set_threads(config)
    sites_grid = SitesGrid(grid, agreement)
    scorer, table = SiteScorer(config.classes, config.class_metrics, sites_grid), agreement.table(sites_grid.names)
    return Task(config, sites_grid, agreement.form, scorer, agreement.to_config(), table)


def instruction_of(config: Config) -> Instruction:
    """Return the instruction to clients that the shared options ask for."""
    # `class_metrics` is of evaluations
    names = {item.name for item in fields(Instruction)} - {"class_metrics"}
    shared = {name: value for name, value in vars(config).items() if name in names}
    work = {"local_steps": 0} if config.local_epochs else {"local_epochs": 1}
    return Instruction(**{**shared, **work, "dynamics_window": config.record_dynamics})


def evaluation_of(experiment: Experiment) -> Instruction:
    """Return the instruction to clients that evaluate."""
    config = experiment.config
    by_nodes = experiment.strategy_class.personal or config.dataset == SITES
    return Instruction(
        seed=config.seed,
        batch_size=config.batch_size,
        report_local_loss=config.train_loss_global and by_nodes,
        class_metrics=",".join(config.class_metrics),
    )


def count_nodes(grid: Grid, config: Config) -> int:
    """Wait for the federation's nodes, and return how many clients the experiment has.

    With `min_nodes` the run starts without the clients that are still absent after `node_timeout` seconds.
    """
    wanted, fewest = max(config.clients, config.min_nodes, 1), config.min_nodes or max(config.clients, 1)
    try:
        nodes = len(wait_for_nodes(grid, wanted, config.node_timeout, fewest))
    except CannotTrainError as error:
        there = [grid.names.get(node) for node in grid.get_node_ids()] if isinstance(grid, PassingGrid) else []
        others = ", ".join(site for site in config.sites if site not in there)
        raise CannotTrainError(f"{error}{f'; not connected: {others}' * bool(others)}") from None
    if nodes > config.clients > 0:
        raise UsageError(
            f"the federation has {nodes} nodes, the experiment {config.clients} clients: they must be equal "
            "(clients=0: one per node; sites=NAME,NAME chooses)"
        )
    if nodes < config.clients:
        absent = config.clients - nodes
        log(WARNING, "%d of %d clients are not connected, the run starts without them", absent, config.clients)
    return config.clients or nodes
