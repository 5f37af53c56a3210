"""The results that a report shows: run folders, comparison folders and matrix folders, also unfinished ones."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.comparison import PLANNED, run_folder, run_folders
from fedbn_flwr.experiments.output.plots import title_of
from fedbn_flwr.experiments.output.run_folder import read_json, read_rounds
from fedbn_flwr.experiments.recipes.matrix import MATRIX, MatrixRecord, Results, read_matrix, setting_folder
from fedbn_flwr.experiments.recipes.recipe import COUNTED, QUANTITIES, Recipe, Setting, columns_of
from fedbn_flwr.plugins.options import UsageError

Row = Mapping[str, Any]
#: the partition of the centralized reference
UNION = "union"
#: options in which settings differ: their runs share no picture, and no difference is taken
OF_SETTINGS = ("dataset", "model", "partition", "clients", "rounds")
#: options in which the seeds of one method differ
OF_SEEDS = ("seed", "results-dir", "resume", "checkpoint-every", "device", "workers")


@dataclass(frozen=True)
class Run:
    """One run, as far as its files are written."""

    setting: str
    #: the method's label
    label: str
    seed: int
    folder: Path
    config: Mapping[str, Any]
    #: a row a round
    rows: Sequence[Row]
    #: a row a round and layer; empty if training dynamics were not recorded
    dynamics: Sequence[Row]
    #: None until the run has ended
    summary: Mapping[str, Any] | None
    #: why the run failed; empty if it did not
    error: str = ""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the run; empty before it began."""
        options: Mapping[str, Any] = self.config.get("options", {})
        return options

    @property
    def rounds(self) -> int | None:
        """The number of rounds that the run is to have; None before it began."""
        return self.options.get("rounds")

    @property
    def state(self) -> str:
        """One of failed, finished, unfinished (it runs, or was interrupted) and waiting."""
        if self.error:
            return "failed"
        if self.summary is not None:
            return "finished"
        return "unfinished" if self.rows else "waiting"


def score_of(runs: Sequence[Run]) -> str:
    """Return the score by which methods are compared."""
    return next((str(run.summary["metric"]) for run in runs if run.summary and "metric" in run.summary), "accuracy")


@dataclass(frozen=True)
class Source:
    """A part of the report: one matrix, one comparison, or runs given one by one."""

    title: str
    #: the results in the form of a matrix; without a paper's numbers if no recipe stands behind them
    results: Results
    runs: Sequence[Run]
    #: None if this is no matrix
    record: MatrixRecord | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe, or one that stands for runs without a recipe."""
        return self.results.recipe

    def runs_of(self, setting: str, label: str) -> list[Run]:
        """Return the runs of one method in one setting."""
        return [run for run in self.runs if (run.setting, run.label) == (setting, label)]


def read_sources(folders: Sequence[Path]) -> list[Source]:
    """Read folders of results; run folders become one part. A UsageError names a folder that holds no results."""
    sources, single = [], []
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder of results")
        if (folder / MATRIX).is_file():
            sources.append(_matrix(folder))
        elif (folder / "compare.json").is_file() or any(folder.glob("*-seed*/config.json")):
            sources.append(_comparison(folder))
        elif (folder / "config.json").is_file():
            single.append(folder)
        else:
            raise UsageError(f"{folder} holds no results of `fedbn-flwr run`, `compare` or `reproduce`")
    return [*sources, _single(single)] if single else sources


def _matrix(folder: Path) -> Source:
    record, results = read_matrix(folder)
    recipe, runs = results.recipe, list[Run]()
    for setting, label in recipe.cells():
        done = {run.get("seed"): run for run in results.runs.get((setting.name, label), [])}
        for seed in range(recipe.seeds):
            place = run_folder(setting_folder(folder, setting), recipe.methods[label], seed)
            runs.append(_run(place, setting.name, label, seed, done.get(seed)))
    return Source(recipe.name, results, runs, record)


def _comparison(folder: Path) -> Source:
    path = folder / "compare.json"
    summaries = read_json(path) if path.exists() else []
    if not isinstance(summaries, list) or not all(isinstance(item, dict) and "method" in item for item in summaries):
        raise UsageError(f"{path} is not the result of a comparison")
    planned = [{"method": method, "seed": seed} for method, seed in read_json(folder / PLANNED) or []]
    listed = {run_folder(folder, entry["method"], entry.get("seed", 0)): entry for entry in [*planned, *summaries]}
    runs = []
    for place in dict.fromkeys([*listed, *run_folders(folder)]):
        entry, options = listed.get(place, {}), (read_json(place / "config.json") or {}).get("options", {})
        method, seed = entry.get("method", options.get("method")), entry.get("seed", options.get("seed", 0))
        runs.append(_run(place, "", method or place.name, seed, entry))
    return _without_recipe(folder.resolve().name, runs)


def _single(folders: Sequence[Path]) -> Source:
    runs = [_run(folder, "", "", 0) for folder in folders]
    methods = [str(run.options.get("method", "")) for run in runs]
    kinds = {
        (method, json.dumps({key: value for key, value in run.options.items() if key not in (*OF_SEEDS, *OF_SETTINGS)}))
        for method, run in zip(methods, runs, strict=True)
    }
    seeds = {(method, _seed(run), *_setting_of(run, runs).values()) for method, run in zip(methods, runs, strict=True)}
    # runs of one method are its seeds only if nothing else differs
    alike = all(methods) and len(kinds) == len(set(methods)) and len(seeds) == len(runs)
    labels = methods if alike else [folder.resolve().name for folder in folders]
    named = [replace(run, label=label, seed=_seed(run)) for label, run in zip(labels, runs, strict=True)]
    return _without_recipe("Runs" if len(folders) > 1 else folders[0].resolve().name, named)


def _without_recipe(title: str, runs: Sequence[Run]) -> Source:
    """Return results without a paper's numbers as those of a matrix, with a setting for each data set and model."""
    # a setting is named by the options in which the settings differ
    values = [_setting_of(run, runs) for run in runs]
    differing = [key for key in OF_SETTINGS if len({each[key] for each in values}) > 1]
    named = [
        ", ".join(f"{each[key]} {key}" if isinstance(each[key], int) else str(each[key]) for key in differing)
        for each in values
    ]
    runs = [replace(run, setting=name) for run, name in zip(runs, named, strict=True)]
    done: dict[tuple[str, str], list[Any]] = {}
    for run in runs:
        entry = {**(run.summary or {}), "seed": run.seed, "error": run.error} if run.error else run.summary
        done.setdefault((run.setting, run.label), []).extend([entry] if entry else [])
    finished = [run.summary for run in runs if run.state == "finished" and run.summary]
    settings = list(dict.fromkeys(run.setting for run in runs))
    about = title_of(finished[0]) if len(settings) == 1 and finished and "partition" in finished[0] else ""
    quantities = [name for name in QUANTITIES if any(columns_of(summary, name, 0) for summary in finished)]
    methods = {run.label: str(run.options.get("method", run.label)) for run in runs}
    absent = [([label for label in methods if (name, label) not in done], [name]) for name in settings if name]
    seeds = max(Counter((run.setting, run.label) for run in runs).values())
    # what is counted stands in the table of costs
    quantities = [name for name in quantities if name not in COUNTED]
    places = [Setting({"setting": name} if name else {}, {}) for name in settings]
    recipe = Recipe(title, "", about, methods, places, absent, seeds, {}, quantities, [], [], [])
    return Source(title, Results(recipe, done), runs)


def _setting_of(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the options of a run's setting.

    The first run tells those that a method names itself, and those of the centralized reference and of waiting runs.
    """
    begun = [other for other in runs if other.options]
    first = next((other for other in begun if other.options.get("partition") != UNION), run)
    own = run.options
    pooled = ("partition", "clients") if own.get("partition") == UNION else ()
    shared = [key for key in OF_SETTINGS if not own or key in pooled or f":{key}=" in str(own.get("method"))]
    return {key: (first if key in shared else run).options.get(key) for key in OF_SETTINGS}


def _run(place: Path, setting: str, label: str, seed: int, summary: Mapping[str, Any] | None = None) -> Run:
    """Read one run by its own files; the `summary` of its matrix or comparison tells more, or why it has no files."""
    own = read_json(place / "summary.json")
    own = {**(summary or {}), **own} if isinstance(own, dict) else summary if "error" in (summary or {}) else None
    config = read_json(place / "config.json")
    error = str((own or {}).get("error") or (own or {}).get("failed") or "")
    rows, dynamics = read_rounds(place), read_rounds(place, "dynamics.jsonl")
    return Run(setting, label, seed, place, config if isinstance(config, dict) else {}, rows, dynamics, own, error)


def _seed(run: Run) -> int:
    return int(run.options.get("seed", 0))


def counts(runs: Sequence[Run]) -> str:
    """Return how many runs are in each state."""
    states = Counter(run.state for run in runs)
    named = [f"{states[state]} {state}" for state in ("finished", "failed", "unfinished", "waiting") if states[state]]
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {', '.join(named)}"
