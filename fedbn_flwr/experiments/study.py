"""A study: methods in settings, with seeds, as a list of runs; and the loop that makes their rows.

`fedbn-flwr run`, `compare` and `reproduce`, and Python, make one. Its folder has `study.json`,
which is what was asked for last, and a folder for every run.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from fedbn_flwr.data.prefetch import serve_parent
from fedbn_flwr.device import as_in_a_new_process, settings_restored
from fedbn_flwr.experiments.checkpoint import AUTOMATIC
from fedbn_flwr.experiments.checks import check_simulation
from fedbn_flwr.experiments.choice import SEEDS, Choice, Grid, metric_of
from fedbn_flwr.experiments.engines import ENGINES, NEEDED, prepare_engine
from fedbn_flwr.experiments.experiment import Experiment, import_plugins, resolve
from fedbn_flwr.experiments.method import all_options, own_options, parse
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.output.run_folder import command_line, make_folder, write_json
from fedbn_flwr.experiments.output.scoring import merit
from fedbn_flwr.experiments.runs import Run, setting_name
from fedbn_flwr.experiments.stopping import SIDE_BY_SIDE, STOP, stoppable
from fedbn_flwr.plugins import Own
from fedbn_flwr.plugins.options import UsageError, as_value, convert
from fedbn_flwr.simulation.processes.worker import preload, start_process

VALIDATION_SHARE = 0.2
#: options that a study sets for all methods alike
COMMON = ("seed", "validation", "results-dir")
#: what was asked for, and the folder of the runs by which values are chosen
STUDY = "study.json"
TRIED = "grid"
#: seconds between two looks whether runs in other processes are to stop
LOOK = 0.5
#: evaluation is the server's; `run_simulation` is the only way to start a simulation from Python;
#: and the command measures models that stay on nodes by itself
_NORMAL = (
    "Federated evaluation will be skipped",
    "`run_simulation` function is deprecated",
    "that stay on the nodes and were not trained",
)
#: of the threads that train in this process
_TURN = threading.RLock()
#: called before every run with its name; returns what to call after every round of it
Announce = Callable[[str], Progress | None]


@dataclass(frozen=True)
class Setting:
    """What all methods are compared in: options, and on every axis of a matrix the label that
    stands for them.
    """

    #: axis -> label
    labels: Mapping[str, str]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The labels, as in the table; empty if there is only one setting."""
        return setting_name(self.labels)


@dataclass(frozen=True)
class Study:
    """Methods in settings, with so many seeds, values to choose from for each, and the engine's
    name.
    """

    #: label -> `STRATEGY[+NORM][:key=value]...`, or a strategy of a user's own
    methods: Mapping[str, str | Own]
    settings: Sequence[Setting]
    seeds: int = 1
    grid: Grid = field(default_factory=dict)
    grid_seeds: int = SEEDS
    engine: str = "stacked"
    #: (methods, labels) that are not run
    left_out: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    #: what the options are read from, if it may be another's
    read_from: str = ""

    def methods_of(self, setting: Setting) -> list[str]:
        """Return the labels of the methods that run in a setting."""
        own = {*setting.labels.values()}
        absent = {
            method for methods, labels in self.left_out if {*labels} <= own for method in methods
        }
        return [method for method in self.methods if method not in absent]

    def cells(self) -> list[tuple[Setting, str]]:
        """Return every setting with every method that runs in it, by label."""
        return [
            (setting, method) for setting in self.settings for method in self.methods_of(setting)
        ]

    def runs(self, folder: Path) -> list[Run]:
        """Return all runs with their folders in that of the study.

        A UsageError says what cannot be.
        """
        for key in self.grid:
            if key in (*COMMON, "method", "plugins", "resume"):
                raise UsageError(f"grid: {key} is the same for all runs, and not to be chosen")
        runs = list[Run]()
        for setting, label in self.cells():
            with _in_cell(setting.name, label):
                runs += self._runs_of(setting, label, folder)
        return runs

    def _runs_of(self, setting: Setting, label: str, folder: Path) -> list[Run]:
        method = self.methods[label]
        common = [key for key in parse(method).options if key in COMMON]
        if common:
            raise UsageError(
                f"method {method!r}: {common[0]} is the same for all methods of a comparison"
            )
        choice = self.choice(method)
        tried = dict[str, list[Run]]()
        combinations = choice.combinations() if choice else {}
        for text, values in combinations.items():
            changes = {**values, "validation": VALIDATION_SHARE}
            named = f"{label}, {text}"
            experiments = [
                self.experiment(setting, label, seed, changes) for seed in range(self.grid_seeds)
            ]
            tried[text] = [
                Run(each, self.engine, folder, setting.labels, named).at(folder / TRIED)
                for each in experiments
            ]
        experiments = [
            replace(self.experiment(setting, label, seed), choice=choice)
            for seed in range(self.seeds)
        ]
        return [
            Run(each, self.engine, folder, setting.labels, label, tried).at(folder)
            for each in experiments
        ]

    def experiment(
        self,
        setting: Setting,
        label: str,
        seed: int,
        changes: Mapping[str, Any] = MappingProxyType({}),
    ) -> Experiment:
        """Resolve one run, with changed options by their keys; it makes checkpoints if options do
        not say when.

        Not on Ray: there nodes write their states into files, on machines that may not reach the
        folder.
        """
        base = int(convert("seed", setting.options.get("seed", 0), int))
        if self.engine == "ray":
            automatic = {}
        else:
            automatic = {"checkpoint-every": AUTOMATIC}
        own = {"method": self.methods[label], "seed": base + seed}
        others = self._options_of_others(self.methods[label])
        options = {key: value for key, value in setting.options.items() if key not in others}
        return resolve({**automatic, **options, **own, **changes}, read_from=self.read_from)

    def _options_of_others(self, method: str | Own) -> set[str]:
        """Return the options of strategies that a method does not have."""
        every = {*all_options()}
        for other in self.methods.values():
            every |= {*own_options(parse(other).strategy)}
        return every - {*own_options(parse(method).strategy)}

    def choice(self, method: str | Own) -> Choice | None:
        """Return what is to be chosen for a method: options of the grid that it has and does not
        name itself.
        """
        without = {*parse(method).options, *self._options_of_others(method)}
        grid = {key: values for key, values in self.grid.items() if key not in without}
        if grid:
            return Choice(grid, self.grid_seeds)
        return None

    def content(self) -> dict[str, Any]:
        """Return a study with one setting as a recipe's file has it."""
        (setting,) = self.settings
        own = ("method", "results-dir")
        options = {key: as_value(value) for key, value in setting.options.items() if key not in own}
        grid = {key: list(values) for key, values in self.grid.items()}
        return {
            "methods": {label: as_value(method) for label, method in self.methods.items()},
            "options": options,
            "seeds": self.seeds,
            "grid": grid,
        }


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Hide Flower's lines about every round, and its warnings of what is the normal case here,
    inside the block.

    The block has torch as in a new process, and after it, the settings of this one are as before.
    Settings and random numbers are those of the whole process, so threads take turns.
    """
    logger = logging.getLogger("flwr")

    def is_news(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NORMAL)

    with _TURN:
        level = logger.level
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
        logger.addFilter(is_news)
        try:
            with settings_restored(), as_in_a_new_process():
                yield
        finally:
            logger.removeFilter(is_news)
            logger.setLevel(level)


def write_study(
    folder: Path,
    study: Study,
    runs: Sequence[Run],
    recipe: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write `study.json`: what was asked for, in the form of a recipe, `more` about it, and the
    list of runs.
    """
    listed = [{**run.place, "folder": run.folder.name} for run in runs]
    try:
        about = {
            "title": folder.name,
            "command": command_line(),
            "recipe": recipe or study.content(),
        }
        content = {**about, **more, "runs": listed}
        write_json(make_folder(folder) / STUDY, content)
    except OSError:
        # what is finished can be read where nothing can be written
        if any(run.finished() is None for run in runs):
            raise


def cells_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs by method and setting: the seeds of a cell choose their values together."""
    return [list(group) for _, group in groupby(runs, key=lambda run: (run.setting, run.label))]


def checked(study: Study, folder: Path, side_by_side: int = 1) -> list[Run]:
    """Return the runs of a study, after every usage error that can be found before the first
    one.
    """
    runs = study.runs(folder)
    for run, *_ in cells_of(runs):  # others differ by the seed only
        with _in_cell(run.setting, run.label):
            prepare_engine(ENGINES[run.engine], run.experiment, side_by_side > 1)
            for each in (run, *(tried[0] for tried in run.tried.values())):
                check_simulation(each.experiment)
    return runs


@contextmanager
def _in_cell(setting: str, label: str) -> Iterator[None]:
    """Let a UsageError name the method and the setting that it is about, if there are several."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{label!r} in {setting!r}: {error}" if setting else str(error)) from error


def execute(
    runs: Sequence[Run], announce: Announce, side_by_side: int = 1
) -> Iterator[tuple[Run, Summary]]:
    """Run what is not finished; return each run with its summary, which of a run that failed has
    the reason.
    """
    if side_by_side > 1:
        yield from _in_processes(cells_of(runs), side_by_side)
        return
    for cell in cells_of(runs):
        yield from _run_cell(cell, announce)


def _run_cell(runs: Sequence[Run], announce: Announce) -> Iterator[tuple[Run, Summary]]:
    """Run one method in one setting with every seed, with the best values of the grid if there is
    one.
    """
    choice = runs[0].experiment.choice
    failure = ""
    if choice and any(run.finished() is None for run in runs):
        choice, failure = _chosen(choice, runs[0].tried, announce)
    for run in runs:
        if not choice or run.finished() is not None:
            yield run, _train(run, announce)
        elif choice.values:
            yield run, _train(_with_values(run, choice), announce)
        else:
            yield run, run.failed(f"no value of its grid came through: {failure}", {})


def _train(run: Run, announce: Announce) -> Summary:
    summary = run.train_or_fail(ENGINES[run.engine], announce(run.name))
    STOP.obey()
    return summary


def _chosen(
    choice: Choice, tried: Mapping[str, Sequence[Run]], announce: Announce
) -> tuple[Choice, str]:
    """Return the values with the best mean score on held-out training data, and the first failure.

    Values with which a run fails are out.
    """
    scores = dict[str, float | None]()
    failure = ""
    metric = ""
    for text, runs in tried.items():
        results = list[float]()
        for run in runs:
            summary = _train(run, announce)
            score = summary.get(metric_of(summary))
            if "failed" in summary or score is None:
                failure = failure or summary.get("failed", "it has no score")
                break
            metric = metric_of(summary)
            results.append(float(score))
        if len(results) == len(runs):
            scores[text] = fmean(results)
        else:
            scores[text] = None
    best = max(
        scores, key=lambda text: -inf if (score := scores[text]) is None else merit(metric, score)
    )
    if scores[best] is None:
        values = {}
    else:
        values = choice.combinations()[best]
    return replace(choice, values=values, scores=scores), failure


def _with_values(run: Run, choice: Choice) -> Run:
    """Return a run with the values that were chosen: as they were tried, on all training data."""
    best = next(text for text, values in choice.combinations().items() if values == choice.values)
    tried = run.tried[best][0].experiment
    own = run.experiment.config
    config = tried.config.but(seed=own.seed, validation=own.data.validation)
    # for `resume`, which does not choose again
    asked = {**(run.experiment.asked or {}), "choice": vars(choice)}
    return replace(run, experiment=replace(tried, config=config, choice=choice, asked=asked))


def _in_processes(cells: Sequence[Sequence[Run]], count: int) -> Iterator[tuple[Run, Summary]]:
    """Run the cells in so many processes at once.

    Return each run with its result, in the order in which they end.
    """
    preload(NEEDED)
    ahead = deque(cells)
    running = dict[Connection, tuple[Sequence[Run], BaseProcess]]()
    told = False
    try:
        while running or (ahead and not STOP.is_asked):
            while ahead and len(running) < count and not STOP.is_asked:
                cell = ahead.popleft()
                connection, process = _start(cell)
                running[connection] = cell, process
            if STOP.is_asked and not told:
                told = True
                for _, process in running.values():
                    process.terminate()  # each stops after its round
            for ready in wait(list(running), timeout=LOOK):
                assert isinstance(ready, Connection)
                cell, process = running.pop(ready)
                yield from _result(ready, process, cell)
    finally:
        for connection, (_, process) in running.items():
            connection.close()
            process.kill()
    STOP.obey()


def _start(cell: Sequence[Run]) -> tuple[Connection, BaseProcess]:
    here, there = Pipe()
    plugins = cell[0].experiment.config.plugins
    verbose = logging.getLogger("flwr").level <= logging.INFO
    process = start_process(_work, there, plugins, cell, verbose, daemon=False)
    there.close()
    return here, process


def _result(
    connection: Connection, process: BaseProcess, cell: Sequence[Run]
) -> list[tuple[Run, Summary]]:
    try:
        return list(zip(cell, connection.recv(), strict=True))
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}"
        if STOP.is_asked:
            return []
        return [(run, run.finished() or run.failed(reason, {})) for run in cell]
    finally:
        connection.close()


def _work(connection: Connection, plugins: str, cell: Sequence[Run], verbose: bool) -> None:
    serve_parent()
    SIDE_BY_SIDE.set()
    import_plugins(plugins)
    with suppress(KeyboardInterrupt), quiet(verbose), stoppable():  # of a stop the parent tells
        connection.send([summary for _, summary in _run_cell(cell, lambda _: None)])
