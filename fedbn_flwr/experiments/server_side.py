"""The server's side of an experiment: one run, from a grid to a folder of results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import ERROR, INFO, WARNING
from math import isfinite, prod
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import state, wire
from fedbn_flwr.client.learning_task import task_of
from fedbn_flwr.client.training import products
from fedbn_flwr.data import SITES
from fedbn_flwr.data.partition import about_absent
from fedbn_flwr.experiments.checkpoint import (
    Checkpoint,
    Saver,
    clear,
    read_checkpoint,
    refuse_other_model,
)
from fedbn_flwr.experiments.checks import (
    check_method_fits,
    checked_material,
    refuse_percent,
    refusing_for,
)
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.experiment import Experiment
from fedbn_flwr.experiments.material import (
    Material,
    absent_classes,
    fresh_model,
    make_partition,
    normalization,
    rounds_within_budget,
    set_up_process,
)
from fedbn_flwr.experiments.output.recorder import Journal, Progress, Standing, Summary
from fedbn_flwr.experiments.output.run_folder import RunFolder, read_config
from fedbn_flwr.experiments.output.scoring import Scorer, SiteScorer
from fedbn_flwr.experiments.output.sinks import open_sinks
from fedbn_flwr.experiments.runs import asked_of
from fedbn_flwr.experiments.sites.agreement import SitesGrid, agree, ask_sites
from fedbn_flwr.experiments.stopping import STOP
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.grids import passing
from fedbn_flwr.server.round import Round
from fedbn_flwr.simulation.how_trained import APART
from fedbn_flwr.simulation.in_process import LocalGrid
from fedbn_flwr.state import arrays_of, arrays_to_record
from fedbn_flwr.strategies import BaseStrategy, CannotTrainError, DivergedError, wait_for_nodes
from fedbn_flwr.transports.counting_grid import CountingGrid
from fedbn_flwr.wire import Instruction

#: most values of a sample that the server tries a model on, for it may be a small machine
MOST_TRIED = 2**20


def run_on_grid(
    grid: Grid,
    experiment: Experiment,
    folder: Path,
    progress: Progress | None = None,
    engine: str = "flower",
) -> Summary:
    """Run one experiment on the nodes of Flower, as soon as they are there, and write its results
    into a folder.
    """
    config = experiment.config
    strategy = experiment.make_strategy(config.clients)
    material = checked_material(experiment, strategy)
    saved = None
    if config.results.resume:
        saved = read_checkpoint(folder)
    nodes = count_nodes(grid, config)
    strategy.min_available_nodes = config.network.min_nodes or nodes
    if material is None:
        before = {}
        if saved:
            before = read_config(folder)["options"]
        setup = set_up_at_sites(grid, config, nodes, strategy, before)
    else:
        if len(material.partition) != nodes:
            material = replace(material, partition=make_partition(config, material.data, nodes))
        setup = set_up_here(grid, material, state.to_record(material.model.state_dict()))
    return play(setup, experiment, strategy, folder, saved, progress, engine)


def play(
    setup: "Setup",
    experiment: Experiment,
    strategy: BaseStrategy,
    folder: Path,
    saved: Checkpoint | None,
    progress: Progress | None,
    engine: str,
) -> Summary:
    """Run an experiment as it is set up, and write its results into a folder.

    What was `saved` in the folder is a checkpoint of this experiment, after which it goes on. Other
    grids may stand in front of the grid of nodes. From the strategy to the nodes: CountingGrid
    (always), SitesGrid, and in a deployment SideChannelGrid, PackingGrid and SitesByName (both
    always, by `serve`).
    """
    asked = asked_of(experiment, engine)
    config = setup.config
    set_up_process(config.engine)
    experiment = replace(experiment, config=config)
    standing = Standing()
    arrays = setup.initial
    saver = Saver(folder, config, setup.grid, strategy, standing)
    if saved:
        refuse_other_model(folder, saved, arrays_of(arrays))
        arrays = saver.restore(saved)
        files = RunFolder(folder, saved.server_round)
    else:
        clear(folder)
        files = RunFolder(folder)
        files.config(experiment.to_mapping(), asked, setup.sites)
    counted = CountingGrid(setup.grid, standing.training, standing.evaluation)
    facts = {**setup.facts, **saver.facts()}
    train_config = ConfigRecord({**instruction_of(config).to_config(always=("lr",)), **facts})
    evaluate_config = ConfigRecord({**evaluation_of(experiment).to_config(), **facts})
    with open_sinks(
        config.results.log_to, folder, experiment.to_mapping(), files.rounds_done
    ) as sinks:
        journal = Journal(files, strategy, counted, config, sinks, standing)
        after_round = AfterRound(
            setup,
            strategy,
            journal,
            standing,
            saver,
            progress,
            (train_config, evaluate_config),
            arrays,
        )
        try:
            if not standing.stopped_by:  # a run may die between its last round and its end
                strategy.start(
                    counted,
                    arrays,
                    config.rounds,
                    config.network.timeout,
                    train_config,
                    evaluate_config,
                    rounds_done=standing.round,
                    on_round=after_round,
                )
        except OSError:  # the disk, and no fault of the run: it can go on
            raise
        except Exception as error:
            failed = journal.summary_of_failure(experiment, setup.about, error)
            summary = {**failed, **trained_by(setup.grid, engine)}
            files.finish(summary, after_round.arrays if standing.round else None)
            log(
                ERROR,
                "The run ended after round %d, what it leaves is in %s",
                standing.round,
                folder,
            )
            raise
        if standing.round < config.rounds and not standing.stopped_by:
            if not strategy.is_finished(counted):
                STOP.obey()
                raise CannotTrainError(
                    f"the strategy's `start` ended after round {standing.round} of {config.rounds}"
                )
            standing.stopped_by = f"{config.method} needs no more rounds"
        if standing.stopped_by:
            log(INFO, "The run ends early: %s", standing.stopped_by)
    summary = {**journal.summary(experiment, setup.about), **trained_by(setup.grid, engine)}
    for reason in summary.get("trained-alone", ()):
        warn_once(APART + reason)
    arrays = after_round.arrays
    saver.save_personal(arrays)
    # what is kept of entries that stay on the nodes is their mean after the last round
    files.finish(summary, arrays_to_record({**arrays_of(arrays), **strategy.state.personal}))
    return summary


def trained_by(grid: Grid, engine: str) -> dict[str, Any]:
    """Return how the nodes of a run were trained, as its summary says it."""
    if isinstance(grid, LocalGrid):
        return grid.how_trained().summary(engine)
    return {"trained-by": f"{engine}, each client by itself"}


@dataclass
class AfterRound:
    """What follows a round: its score, its row, the progress shown, a checkpoint if it is time, and
    perhaps the end.
    """

    setup: "Setup"
    strategy: BaseStrategy
    journal: Journal
    standing: Standing
    saver: Saver
    progress: Progress | None
    #: of the messages of later rounds, which tell nodes of the latest checkpoint
    configs: Sequence[ConfigRecord]
    #: the state that the latest round has ended with
    arrays: ArrayRecord

    def __call__(self, now: Round) -> bool:
        """Take a round that has ended; return whether the run ends with it."""
        config = self.setup.config
        scorer = self.setup.scorer
        self.arrays = now.after
        self.standing.round = now.number
        with products(instruction_of(config)):
            score = {}
            if self.strategy.evaluates(now.number):
                score = scorer.score(self.strategy, now.after)
        self.journal.record(now, score)
        is_last = now.number >= config.rounds or self.strategy.is_finished(self.setup.grid)
        self.standing.take(now.number, score, scorer.metric, config.results, is_last)
        reached = self.standing.score.get(scorer.metric)
        if self.progress:
            self.progress(now.number, config.rounds, reached)
        ends = is_last or self.standing.stopped_by
        if ends and reached is not None and not isfinite(reached):
            why = now.circumstances(self.strategy.state)
            raise DivergedError(now.number, f"the model's {scorer.metric} is {reached}; {why}")
        stops = STOP.is_asked and not is_last
        if stops or self.saver.is_due(now.number):
            self.saver.save(now)
            for told in self.configs:
                told.update(self.saver.facts())
        return stops or bool(self.standing.stopped_by)


@dataclass(frozen=True)
class Setup:
    """A run's options with what its data decide, the nodes that have data for it, and who scores
    its models.
    """

    config: Config
    grid: Grid
    initial: ArrayRecord
    scorer: Scorer | SiteScorer
    #: what the summary says of nodes and data
    about: Mapping[str, Any]
    #: what every message tells a node of the data
    facts: ConfigRecord = field(default_factory=ConfigRecord)
    #: a row about each site's data
    sites: Sequence[Mapping[str, Any]] = ()


def set_up_here(grid: Grid, material: Material, initial: ArrayRecord) -> Setup:
    """Return the setup of a run whose data are here."""
    loaded = material.data
    parts = material.partition
    config = rounds_within_budget(material.config, len(parts), len(loaded.train))
    scorer = Scorer(material)
    about = {"clients": len(parts), **normalization(loaded.train), "image-size": loaded.image_size}
    about["metric"] = scorer.metric
    named = {"class-names": loaded.class_names, "absent-classes": absent_classes(loaded, parts)}
    return Setup(
        config,
        grid,
        initial,
        scorer,
        {**about, **{key: names for key, names in named.items() if names}},
    )


def set_up_at_sites(
    grid: Grid, config: Config, nodes: int, strategy: BaseStrategy, before: Mapping[str, Any]
) -> Setup:
    """Ask the sites what their data are, agree on what they have in common, and try the model on
    samples of that form.

    `before` are the options of the run that goes on, if there is one.
    """
    if before and not config.data.mean:
        # what the sites agreed on then: today another one may be absent
        config = Config.from_mapping(
            {**config.to_mapping(), "mean": before["mean"], "std": before["std"]}
        )
    answers = ask_sites(grid, sorted(grid.get_node_ids()), config.network.node_timeout)
    agreement = agree(config.but(partition=SITES), answers)
    config = rounds_within_budget(agreement.config, nodes, agreement.samples)
    with refusing_for(config):
        task = task_of(agreement.task, config.model.objective)
        model = fresh_model(config.model, agreement.form, config.seed)
        if prod(agreement.shape) <= MOST_TRIED:
            check_method_fits(agreement.example(task, model), strategy)
    initial = state.to_record(model.state_dict())
    sites_grid = SitesGrid(grid, agreement)
    refuse_percent(config.results.stop_at, task.metric)
    scorer = SiteScorer(task, config.data.classes, config.results.class_metrics, sites_grid)
    table = agreement.table(sites_grid.names)
    about = {
        "clients": nodes,
        **normalization(config.data),
        "image-size": agreement.form.image_size,
    }
    about["metric"] = scorer.metric
    if config.data.classes:
        about["class-names"] = config.data.classes
    absent = agreement.absent_classes
    if absent:
        warn_once(about_absent(absent, SITES, nodes))
        about["absent-classes"] = absent
    return Setup(config, sites_grid, initial, scorer, about, agreement.to_config(), table)


def instruction_of(config: Config) -> Instruction:
    """Return the instruction to clients that the shared options ask for."""
    training = vars(config.training).copy()
    if config.training.local_epochs:
        training["local_steps"] = 0
    else:
        training["local_epochs"] = 1
    return Instruction(seed=config.seed, dynamics_window=config.results.record_dynamics, **training)


def evaluation_of(experiment: Experiment) -> Instruction:
    """Return the instruction to clients that evaluate."""
    config = experiment.config
    by_nodes = experiment.strategy_class.personal or config.data.dataset == SITES
    loss = ""
    if config.results.train_loss_global and by_nodes:
        loss = wire.LOCAL_LOSS
    return Instruction(
        seed=config.seed,
        batch_size=config.training.batch_size,
        precision=config.training.precision,
        report_loss=loss,
        class_metrics=",".join(config.results.class_metrics),
    )


def count_nodes(grid: Grid, config: Config) -> int:
    """Wait for the federation's nodes, and return how many clients the experiment has.

    With `min_nodes` the run starts without the clients that are still absent after `node_timeout`
    seconds.
    """
    wanted = max(config.clients, config.network.min_nodes, 1)
    fewest = config.network.min_nodes or max(config.clients, 1)
    try:
        nodes = len(wait_for_nodes(grid, wanted, config.network.node_timeout, fewest))
    except CannotTrainError as error:
        front = passing(grid)
        names = front.names if front else {}
        there = {names.get(node) for node in grid.get_node_ids()}
        missing = [site for site in config.network.sites if site not in there]
        if missing:
            raise CannotTrainError(f"{error}; not connected: {', '.join(missing)}") from None
        raise
    if nodes > config.clients > 0:
        raise UsageError(
            f"the federation has {nodes} nodes, the experiment {config.clients} clients: they "
            "must be equal (clients=0: one per node; sites=NAME,NAME chooses)"
        )
    if nodes < config.clients:
        absent = config.clients - nodes
        log(
            WARNING,
            "%d of %d clients are not connected, the run starts without them",
            absent,
            config.clients,
        )
    return config.clients or nodes
