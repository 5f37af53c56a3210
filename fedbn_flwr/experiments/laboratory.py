"""Experiments from Python: `compare` and `run` of `fedbn_flwr`. The commands of the same names call them."""

import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, Literal

import torch

from fedbn_flwr.data.own_data import OwnData
from fedbn_flwr.experiments.choice import SEEDS, Grid
from fedbn_flwr.experiments.comparison import Plan, run_folder
from fedbn_flwr.experiments.comparison import compare as compare_runs
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.engines import ENGINES, engine_named, prepare
from fedbn_flwr.experiments.given_objects import Method, Model, dataset_of, method_of, model_of
from fedbn_flwr.experiments.kept_run import KeptRun, keeping, resume
from fedbn_flwr.experiments.method import import_plugins, owners, parse, resolve
from fedbn_flwr.experiments.output.console import Bars
from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.experiments.resources import check_simulation, load_data
from fedbn_flwr.experiments.results.results import Results
from fedbn_flwr.plugins.options import UsageError, option_key

#: evaluation is the server's; `run_simulation` is the only way to start a simulation from Python; and the command
#: measures models that stay on nodes by itself
_NORMAL = (
    "Federated evaluation will be skipped",
    "`run_simulation` function is deprecated",
    "that stay on the nodes and were not trained",
)
RESULTS = "results-dir"
#: how a call shows how far it has come: a bar, also lines where there is no terminal for a bar, or nothing
Shown = bool | Literal["lines"]
#: stands for what is not given; None may come from a loader that has forgotten `return`
UNSET: Any = object()


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Hide Flower's lines about every round, and its warnings of what is the normal case here, inside the block.

    Runs set torch's threads; after the block there are as many as before.
    """
    logger, threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = logger.level

    def is_news(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NORMAL)

    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
        logger.setLevel(level)
        torch.set_num_threads(threads)


def compare(
    methods: Sequence[Method],
    *,
    model: Model = UNSET,
    data: str | OwnData = UNSET,
    folder: str | Path | None = None,
    seeds: int = 1,
    grid: Grid = MappingProxyType({}),
    grid_seeds: int = SEEDS,
    engine: str = "stacked",
    overwrite: bool = False,
    progress: Shown = True,
    verbose: bool = False,
    **options: Any,
) -> Results:
    """Train with several methods on the same data, model and seeds.

        compare(["fedavg", "fixbn", MyMethod(mu=0.1)], model=make_net, data=(train, test), rounds=100, seeds=3)

    - `methods`: names with options (`fedprox:mu=0.1`), strategies, or their classes.
    - `model`: a name, a function or class that makes a `torch.nn.Module`, or such a module.
    - `data`: a name, `fedbn_flwr.data.Data`, a function that returns them, or a pair of training and test data: each
      tensors (inputs, labels), or a torch `Dataset`.
    - `grid`: values of options to choose from for each method, such as `{"lr": [0.03, 0.1]}`, by the mean score of
      `grid_seeds` runs on held-out training data.
    - `options`: those of the command, with underscores, such as `partition="classes:2"`.
    - `folder`: where runs are kept. The same call goes on there, more methods and seeds are added, and other options
      need `overwrite`. Without it, runs are gone with the results that are returned.
    - `progress`: a bar in a terminal or a notebook; with `"lines"`, lines elsewhere.

    A UsageError, which is a ValueError, says in one line what is wrong and what is allowed. A method that fails does
    not stop the others: `Results.failures` says why it failed.
    """
    with quiet(verbose):
        given = given_options(model, data, folder, options)
        plan = checked(Plan(given, (), seeds, grid, grid_seeds, engine, overwrite), methods)
        for method in plan.methods:
            prepare(ENGINES[engine], plan.experiment(method, 0))
        plan.check()
        with _opened(given.get(RESULTS)) as (place, is_kept):
            runs = [run for method in plan.methods for run in plan.runs(place, method)]
            data_of_all = load_data(runs[0].experiment.config)
            with (
                keeping(place, runs) if is_kept else nullcontext(),
                Bars(sum(map(plan.count, plan.methods)), data_of_all, progress) as bars,
            ):
                summaries = compare_runs(plan, place, bars.announce)
        folders = {
            (each["method"], each["seed"]): run_folder(place, each["method"], each["seed"]) for each in summaries
        }
        return Results(place, summaries, folders, [run.experiment for run in runs], is_kept)


def run(
    method: Method | None = None,
    *,
    model: Model = UNSET,
    data: str | OwnData = UNSET,
    folder: str | Path | None = None,
    engine: str | None = None,
    overwrite: bool = False,
    progress: Shown = True,
    verbose: bool = False,
    **options: Any,
) -> Results:
    """Train with one method; arguments are as in `compare`. A run that fails raises an error."""
    with quiet(verbose):
        given = given_options(model, data, folder, options)
        given |= {} if method is None else {"method": method_of(method)}
        if given.get("resume"):
            experiment, engine = resume(given, engine)
        else:
            _refuse_ignored([given.get("method", Config.method)], given)
            experiment = resolve(given)
        engine = engine_named(engine)
        prepare(ENGINES[engine], experiment)
        check_simulation(experiment)
        wanted = experiment.config.results_dir
        with _opened(wanted if RESULTS in given or wanted != Config.results_dir else None) as (place, is_kept):
            automatic = not (given.get("resume") or "checkpoint-every" in given)
            kept = KeptRun.of(experiment, engine, place, overwrite, automatic)
            with (
                keeping(place, [kept]) if is_kept else nullcontext(),
                Bars(1, load_data(experiment.config), progress) as bars,
            ):
                summary = kept.run(ENGINES[engine], bars.announce(experiment.config.method))
        return Results(place, [summary], {(summary["method"], summary["seed"]): place}, [experiment], is_kept)


def given_options(
    model: Model, data: str | OwnData, folder: str | Path | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return options by the keys of the command; objects become names that hold them."""
    given = {
        key.replace("_", "-"): tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    if data is not UNSET and "dataset" in given:
        raise UsageError("data and dataset mean the same: give one of them")
    given |= {} if model is UNSET else {"model": model_of(model)}
    given |= {} if data is UNSET else {"dataset": dataset_of(data)}
    return given | ({} if folder is None else {RESULTS: str(folder)})


def checked(plan: Plan, methods: Sequence[Method]) -> Plan:
    """Return the plan with these methods; a UsageError names methods, seeds or an engine that cannot be."""
    engine_named(plan.engine)
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise UsageError(f"methods must be a list of at least one method, got {methods!r}")
    for name, count in (("seeds", plan.seeds), ("grid_seeds", plan.grid_seeds)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, got {count!r}")
    grid, given = {option_key(key): values for key, values in plan.grid.items()}, plan.options
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UsageError(f"grid: {key} must have a list of at least one value, got {values!r}")
    for key in {"method", "resume"} & given.keys():
        raise UsageError(f"compare has no option {key!r}; `methods` names methods, and the same call goes on by itself")
    import_plugins(str(given.get("plugins", "")))
    texts = [method_of(method) for method in methods]
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise UsageError(f"methods names {twice[0]!r} twice")
    _refuse_ignored(texts, {**given, **grid})
    return replace(plan, methods=texts, grid=grid)


def _refuse_ignored(methods: Sequence[str], given: Mapping[str, Any]) -> None:
    """Refuse an option of single strategies that none of the methods has.

    In a comparison, one that some of them have is for these.
    """
    import_plugins(str(given.get("plugins", "")))
    strategies = [parse(method).strategy for method in methods]
    for key in given:
        if (names := owners(key)) and not set(names) & set(strategies):
            raise UsageError(f"{key} is an option of {', '.join(names)}; {', '.join(strategies)} would ignore it")


@contextmanager
def _opened(folder: str | None) -> Iterator[tuple[Path, bool]]:
    """Make a folder of results; a temporary one, which is removed if the work fails, if there is no name."""
    if folder is not None:
        yield make_folder(Path(folder)), True
        return
    temporary = Path(mkdtemp(prefix="fedbn-flwr-"))
    try:
        yield temporary, False
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            print("fedbn-flwr: stopped; runs are kept where the call names a folder", file=sys.stderr)
        raise
