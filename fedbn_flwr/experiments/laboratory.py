"""Experiments from Python: `compare` and `run` of `fedbn_flwr`. The commands of the same names call
them.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

from torch import nn

from fedbn_flwr.data.own_data import OwnData, own_data
from fedbn_flwr.experiments.checks import check_simulation
from fedbn_flwr.experiments.choice import SEEDS, Grid
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.engines import ENGINES, engine_named, prepare_engine
from fedbn_flwr.experiments.experiment import data_here, import_plugins, look_again, resolve
from fedbn_flwr.experiments.material import load_data
from fedbn_flwr.experiments.method import Method, method_of, parse, refuse_ignored, with_option
from fedbn_flwr.experiments.output.console import Bars
from fedbn_flwr.experiments.results.results import Results
from fedbn_flwr.experiments.runs import keeping, resume
from fedbn_flwr.experiments.study import (
    STUDY,
    Setting,
    Study,
    cells_of,
    checked,
    execute,
    quiet,
    write_study,
)
from fedbn_flwr.models import check_entries
from fedbn_flwr.plugins import Own, described
from fedbn_flwr.plugins.options import UsageError, as_given, option_key, refusing, whole_number

#: a name, a function or class that makes a model, or a model
Model = str | Callable[..., nn.Module] | nn.Module
RESULTS = "results-dir"
#: stands for every domain of the data, one after another
EACH = "each"
#: stands for what is not given; None may come from a loader that has forgotten `return`
UNSET: Any = object()


def compare(
    methods: Method | Sequence[Method],
    *,
    model: Model = UNSET,
    data: str | OwnData = UNSET,
    folder: str | Path | None = None,
    seeds: int = 1,
    grid: Grid = MappingProxyType({}),
    grid_seeds: int = SEEDS,
    engine: str = "stacked",
    side_by_side: int = 1,
    reuse: bool = False,
    anew: bool = False,
    progress: bool = True,
    verbose: bool = False,
    **options: Any,
) -> Results:
    """Train with several methods on the same data, model and seeds.

        methods = ["fedavg", "fixbn", MyMethod(mu=0.1)]
        compare(methods, model=make_net, data=(train, test), rounds=100, seeds=3)

    - `methods`: names with options (`fedprox:mu=0.1`), strategies, or their classes; a list, or one
      of them.
    - `model`: a name, a function or class that makes a `torch.nn.Module`, or such a module.
    - `data`: a name, `fedbn_flwr.data.Data`, a function that returns them, or a pair of training
      and test data: each tensors (inputs, labels), or a torch `Dataset`.
    - `grid`: values of options to choose from for each method, such as `{"lr": [0.03, 0.1]}`, by
      the mean score of `grid_seeds` runs on held-out training data.
    - `side_by_side`: how many methods run at once, each in a process.
    - `options`: those of the command, with underscores, such as `partition="classes:2"`.
    - `folder`: where runs are kept. The same call goes on there, and runs with other options,
      methods and seeds lie beside them. Without it, runs are gone with the results that are
      returned.
    - `reuse`, `anew`: what becomes of runs in the folder that were made with code or data of your
      own, which nothing can compare: taken as they are, or trained again (any run, and what it had
      lies in `before`). Without either, the call stops before it trains.
    - `progress`: a bar in a terminal or a notebook, and elsewhere a line in every tenth of the
      rounds.

    A UsageError, which is a ValueError, says in one line what is wrong and what is allowed. A
    method that fails does not stop the others: `Results.failures` says why it failed.
    """
    with quiet(verbose):
        given = given_options(model, data, folder, options)
        if isinstance(methods, str) or not isinstance(methods, Sequence):
            methods = [methods]
        study = study_of(methods, given, seeds, grid, grid_seeds, engine, side_by_side)
        with _opened(given.get(RESULTS)) as (place, is_kept):
            runs = checked(study, place, side_by_side)
            total = len(runs) + sum(
                len(each) for run, *_ in cells_of(runs) for each in run.tried.values()
            )
            with (
                keeping(place, runs, reuse, anew) if is_kept else nullcontext(),
                Bars(total, load_data(runs[0].experiment.config.data), progress) as bars,
            ):
                write_study(place, study, runs)
                ended = list(execute(runs, bars.announce, side_by_side))
        places = [run.folder for run in runs]
        rows = sorted(ended, key=lambda each: places.index(each[0].folder))
        return Results(place, rows, is_kept)


def run(
    method: Method | None = None,
    *,
    model: Model = UNSET,
    data: str | OwnData = UNSET,
    folder: str | Path | None = None,
    engine: str | None = None,
    reuse: bool = False,
    anew: bool = False,
    progress: bool = True,
    verbose: bool = False,
    **options: Any,
) -> Results:
    """Train with one method; arguments are as in `compare`. A run that fails raises an error."""
    with quiet(verbose):
        given = given_options(model, data, folder, options)
        if method is not None:
            given["method"] = method_of(method)
        asked = given.get("method", Config.method)
        label = str(asked)
        resumed = given.get("resume")
        if resumed and anew:
            raise UsageError(
                "resume goes on with a run, and anew begins it again: give one of them"
            )
        if not resumed:
            refuse_ignored([parse(asked)], given)
        with _opened(resumed or given.get(RESULTS)) as (place, is_kept):
            if resumed:
                one = resume(given, engine)
                engine_named(one.engine)
            else:
                study = Study({label: asked}, [Setting({}, given)], engine=engine_named(engine))
                (one,) = study.runs(place)
            prepare_engine(ENGINES[one.engine], one.experiment)
            check_simulation(one.experiment)
            if not anew:
                one.refuse_other_run()
            study_folder = one.folder.parent
            if (study_folder / STUDY).exists() or not resumed:
                held = study_folder
            else:
                held = one.folder
            with (
                # naming the folder of a run to go on with vouches for its code
                keeping(held, [one], reuse or bool(resumed), anew) if is_kept else nullcontext(),
                Bars(1, load_data(one.experiment.config.data), progress) as bars,
            ):
                if not resumed:
                    write_study(place, study, [one])
                summary = one.train(ENGINES[one.engine], bars.announce(one.name))
        return Results(place, [(one, summary)], is_kept)


def given_options(
    model: Model, data: str | OwnData, folder: str | Path | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return options by the keys of the command; objects get names.

    Plug-ins are imported, and what was read from files that have changed since is forgotten.
    """
    look_again()
    given = {option_key(key): as_given(value) for key, value in options.items()}
    import_plugins(str(given.get("plugins", "")))
    objective = given.get("objective")
    if callable(objective):
        name = getattr(objective, "__name__", type(objective).__name__)
        given["objective"] = Own(name, objective)
    if data is not UNSET and "dataset" in given:
        raise UsageError("data and dataset mean the same: give one of them")
    if model is not UNSET:
        given["model"] = model_of(model)
    if data is not UNSET:
        given["dataset"] = dataset_of(data)
    if folder is not None:
        given[RESULTS] = str(folder)
    return given


def model_of(given: Model) -> str | Own:
    """Return a model's name, which holds the function that makes it if it is none of the registered
    ones.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, nn.Module):
        name = type(given).__name__
        with refusing():
            check_entries(name, given)
        try:
            held = deepcopy(given)
        except Exception as error:  # of whatever kind a user's class raises
            raise UsageError(
                f"model {name!r} cannot be copied, so give a function that makes it: "
                f"{described(error)}"
            ) from error
        return Own(name, lambda: deepcopy(held))
    if not callable(given):
        raise UsageError(
            "model must be a name, a function or class that makes a torch.nn.Module, or a "
            f"torch.nn.Module, got {type(given).__name__}"
        )
    return Own(getattr(getattr(given, "func", given), "__name__", "model"), given)


def dataset_of(given: str | OwnData) -> str | Own:
    """Return a data set's name, which holds the data if they are none of the registered ones."""
    if isinstance(given, str):
        return given
    with refusing():
        data = own_data(given)
    return Own(data.name, data)


def study_of(
    methods: Sequence[Method],
    given: Mapping[str, Any],
    seeds: int,
    grid: Grid,
    grid_seeds: int,
    engine: str,
    side_by_side: int = 1,
) -> Study:
    """Return the study of these methods.

    A UsageError names methods, seeds or an engine that cannot be.
    """
    engine_named(engine)
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise UsageError(f"methods must be a list of at least one method, got {methods!r}")
    seeds = whole_number("seeds", seeds)
    grid_seeds = whole_number("grid_seeds", grid_seeds)
    whole_number("side_by_side", side_by_side)
    if not isinstance(grid, Mapping):
        raise UsageError(f"grid must be a mapping of options to lists of values, got {grid!r}")
    grid = {option_key(key): as_given(values) for key, values in grid.items()}
    for key, values in grid.items():
        if not isinstance(values, tuple) or not values:
            raise UsageError(f"grid: {key} must have a list of at least one value, got {values!r}")
    for key in {"method", "resume"} & given.keys():
        raise UsageError(
            f"compare has no option {key!r}; `methods` names methods, and the same call goes on "
            "by itself"
        )
    asked = [method_of(method) for method in methods]
    texts = [str(method) for method in asked]
    twice = [text for text in texts if texts.count(text) > 1]
    if twice:
        raise UsageError(f"methods names {twice[0]!r} twice")
    refuse_ignored([parse(method) for method in asked], {**given, **grid})
    if given.get("unseen") == EACH:
        given = {key: value for key, value in given.items() if key != "unseen"}
        data = data_here(resolve({**given, "method": asked[0]}).config.data)
        # the runs refuse `each` as a domain that there is not, or say that the data are not here
        names = [EACH]
        if data and data.domain_names:
            names = [*data.domain_names]
        asked = [with_option(method, "unseen", name) for name in names for method in asked]
    labels = {str(method): method for method in asked}
    return Study(labels, [Setting({}, given)], seeds, grid, grid_seeds, engine)


@contextmanager
def _opened(folder: str | None) -> Iterator[tuple[Path, bool]]:
    """Return a folder of results.

    Without a name it is a temporary one, which is removed if the work fails.
    """
    if folder is not None:
        yield Path(folder).expanduser(), True
        return
    temporary = Path(mkdtemp(prefix="fedbn-flwr-"))
    try:
        yield temporary, False
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            print(
                "fedbn-flwr: stopped; runs are kept where the call names a folder", file=sys.stderr
            )
        raise
