"""The server's side of an experiment: one run, from a grid to a folder of results."""

import os
from collections.abc import Mapping
from dataclasses import replace
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import state
from fedbn_flwr.data import SITES
from fedbn_flwr.experiments.checkpoint import Checkpoint, clear, read_checkpoint, refuse_foreign, refuse_other_model
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.output.plots import draw_or_warn, title_of
from fedbn_flwr.experiments.output.recorder import Journal, Progress, Summary
from fedbn_flwr.experiments.output.run_folder import RunFolder, read_rounds
from fedbn_flwr.experiments.output.sinks import open_sinks
from fedbn_flwr.experiments.recovery import Recovery
from fedbn_flwr.experiments.resources import check, fresh_model, refuse_state_dir, refuse_workers
from fedbn_flwr.experiments.task import Task, make_task
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.averaging import unpack
from fedbn_flwr.strategies import Layerwise, wait_for_nodes
from fedbn_flwr.traffic.counting_grid import CountingGrid
from fedbn_flwr.transports.stream_transport import StreamGrid, StreamOptions
from fedbn_flwr.wire import Instruction

#: where a deployment's server keeps the results of its runs, each in a folder of the run's number
RESULTS_VARIABLE = "FEDBN_FLWR_RESULTS"
#: samples that stand behind the statistics of a layer-wise step, at least: remark 4 of FedTAN's paper
LEAST_BATCH = 32


def serve(grid: Grid, run_config: Mapping[str, Any], run_id: int = 0) -> Summary:
    """Run what a Flower run configuration says, and log where the results are.

    A relative `results-dir` is relative to where the SuperLink was started: Flower does not tell where `flwr run` was.
    Where `FEDBN_FLWR_RESULTS` names a folder, results go to `run_id` in it, and `results-dir` counts for nothing;
    `resume` is then the number of a run.
    """
    experiment = resolve(run_config)
    refuse_state_dir(experiment.config)
    refuse_workers(experiment.config)
    warn_of_small_batches(experiment)
    folder = results_folder(experiment.config, run_id)
    summary = run(with_side_channel(grid, experiment), experiment, folder)
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
    waits = config.connect_timeout, config.exchange_timeout or config.timeout
    try:
        options = StreamOptions.of(config.exchange_port, config.exchange_address, *waits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return grid if options is None else StreamGrid(grid, options)


def warn_of_small_batches(experiment: Experiment) -> None:
    """Warn if the statistics of few samples leave the sites, from which an attacker may reconstruct these samples."""
    size = experiment.config.batch_size
    if issubclass(experiment.strategy_class, Layerwise) and size < LEAST_BATCH:
        text = (
            "%s sends the BN statistics of mini-batches of %d samples; FedTAN's authors advise at least %d (remark 4)"
        )
        log(WARNING, text, experiment.strategy, size, LEAST_BATCH)


def run(
    grid: Grid, experiment: Experiment, folder: Path, progress: Progress | None = None, engine: str = "flower"
) -> Summary:
    """Run one experiment on a grid and write its results into a folder.

    With `resume` the folder holds a run of this experiment, which goes on after its last checkpoint.
    """
    check(experiment)
    nodes = count_nodes(grid, experiment.config)
    saved = read_checkpoint(folder) if experiment.config.resume else None
    task = make_task(grid, experiment.config, nodes, saved.options if saved else {})
    experiment = replace(experiment, config=task.config)
    initial = state.to_record(fresh_model(task.config, task.form).state_dict())
    files = (
        _continued(folder, experiment, engine, saved, initial) if saved else _begun(folder, experiment, engine, task)
    )
    strategy, counted = experiment.make_strategy(nodes), CountingGrid(task.grid)
    with open_sinks(task.config.log_to, folder, experiment.to_mapping(), files.rounds_done) as sink:
        journal = Journal(files, strategy, counted, task.scorer, task.config, sink, progress)
        recovery = Recovery(folder, experiment, engine, task.grid, strategy, journal)
        arrays = recovery.restore(saved) if saved else initial
        try:
            strategy.start(
                counted,
                arrays,
                task.config.rounds,
                rounds_done=files.rounds_done,
                timeout=task.config.timeout,
                train_config=recovery.tell(
                    ConfigRecord({**instruction_of(task.config).to_config(always=("lr",)), **task.told})
                ),
                evaluate_config=recovery.tell(ConfigRecord({**evaluation_of(experiment).to_config(), **task.told})),
                evaluate_fn=recovery.record,
            )
        except OSError:  # the disk, and no fault of the run: it can go on
            raise
        except Exception as error:
            if journal.arrays is not None:
                summary = journal.summary_of_failure(experiment, nodes, error)
                files.finish(summary, journal.arrays)
                log(ERROR, "The run ended after round %d, its last model is in %s", summary["rounds-done"], folder)
            raise
    summary = journal.summary(experiment, nodes)
    files.finish(summary, journal.arrays or arrays)
    clear(folder)
    draw_or_warn({task.config.method: [read_rounds(folder)]}, folder / "curves.png", title_of(summary))
    return summary


def _begun(folder: Path, experiment: Experiment, engine: str, task: Task) -> RunFolder:
    """Return the folder of a run that starts at round 1, with its options written."""
    clear(folder)
    files = RunFolder(folder)
    files.config(experiment.to_mapping(), task.sites, engine)
    return files


def _continued(folder: Path, experiment: Experiment, engine: str, saved: Checkpoint, initial: ArrayRecord) -> RunFolder:
    """Return the folder of the run that a checkpoint is of; a UsageError if it is of another run."""
    refuse_foreign(folder, saved, experiment.to_mapping(), engine)
    refuse_other_model(folder, saved, unpack(initial))
    return RunFolder(folder, saved.server_round)


def instruction_of(config: Config) -> Instruction:
    """Return the instruction to clients that the shared options ask for."""
    return Instruction(
        seed=config.seed,
        local_steps=0 if config.local_epochs else config.local_steps,
        local_epochs=config.local_epochs or 1,
        batch_size=config.batch_size,
        replacement=config.replacement,
        augmentation=config.augmentation,
        optimizer=config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        precision=config.precision,
        dynamics_window=config.record_dynamics,
    )


def evaluation_of(experiment: Experiment) -> Instruction:
    """Return the instruction to clients that evaluate."""
    config = experiment.config
    by_nodes = experiment.strategy_class.personal or config.dataset == SITES
    return Instruction(
        seed=config.seed,
        report_local_loss=config.train_loss_global and by_nodes,
        class_metrics=",".join(config.class_metrics),
    )


def count_nodes(grid: Grid, config: Config) -> int:
    """Wait for the federation's nodes, and return how many clients the experiment has.

    With `min_nodes` the run starts without the clients that are still absent after `node_timeout` seconds.
    """
    wanted, fewest = max(config.clients, config.min_nodes, 1), config.min_nodes or max(config.clients, 1)
    nodes = len(wait_for_nodes(grid, wanted, config.node_timeout, fewest))
    if nodes > config.clients > 0:
        raise UsageError(
            f"the federation has {nodes} nodes, the experiment {config.clients} clients: they must be equal "
            "(clients=0: one per node)"
        )
    if nodes < config.clients:
        log(
            WARNING,
            "%d of %d clients are not connected, the run starts without them",
            config.clients - nodes,
            config.clients,
        )
    return config.clients or nodes
