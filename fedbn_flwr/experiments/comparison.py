"""Several methods on the same data, model and seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from fedbn_flwr.experiments.choice import SEEDS, Choice, Grid
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.kept_run import LOST, OVERWRITE, KeptRun, finished_summary, has_results, options_in
from fedbn_flwr.experiments.method import Experiment, all_options, import_plugins, own_options, parse, resolve
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.output.run_folder import make_folder, read_json, read_rounds, write_json
from fedbn_flwr.experiments.resources import check_simulation
from fedbn_flwr.experiments.results.pictures import draw_or_warn
from fedbn_flwr.experiments.results.rows import metric_of, title_of, typical
from fedbn_flwr.plugins.options import UsageError, convert, options_of
from fedbn_flwr.strategies import REGISTRY

VALIDATION_SHARE = 0.2
#: options that a comparison sets for all methods alike
COMMON = ("seed", "validation", "results-dir")
#: the runs that a comparison is to have, so that reports name those that have not begun
PLANNED = "planned.json"


@dataclass(frozen=True)
class Plan:
    """A plan of runs to compare: options, methods, seeds, values of options to choose from, and the engine's name."""

    options: Mapping[str, Any]
    methods: Sequence[str]
    seeds: int = 1
    grid: Grid = field(default_factory=dict)
    grid_seeds: int = SEEDS
    engine: str = "stacked"
    #: whether other runs in the folders are replaced
    overwrite: bool = False

    def experiment(self, method: str, seed: int, changes: Mapping[str, Any] = MappingProxyType({})) -> Experiment:
        """Resolve one run of the plan, with changed options by their keys."""
        base = int(convert("seed", self.options.get("seed", 0), int))
        return resolve({**self.options, "method": method, "seed": base + seed, **changes})

    def kept(self, experiment: Experiment, place: Path) -> KeptRun:
        """Return a run of the plan with its folder; it makes checkpoints by itself if options do not say when."""
        automatic = "checkpoint-every" not in self.options
        return KeptRun.of(experiment, self.engine, place, self.overwrite, automatic)

    def runs(self, folder: Path, method: str, choice: Choice | None = None) -> list[KeptRun]:
        """Return the runs of a method, one a seed, with their folders in that of the comparison."""
        choice = choice or self.choice(method)
        values = choice.values if choice else {}
        experiments = [replace(self.experiment(method, seed, values), choice=choice) for seed in range(self.seeds)]
        return [self.kept(each, run_folder(folder, method, each.config.seed)) for each in experiments]

    def choice(self, method: str) -> Choice | None:
        """Return what is to be chosen for a method: options of the grid that it has and does not name itself."""
        strategy, _, named = parse(method)
        others = all_options().keys() - own_options(REGISTRY[strategy])
        grid = {key: values for key, values in self.grid.items() if key not in named and key not in others}
        return Choice(grid, self.grid_seeds) if grid else None

    def count(self, method: str) -> int:
        """Return the number of a method's runs, with those of its search."""
        choice = self.choice(method)
        return self.seeds + (self.grid_seeds * len(choice.combinations()) if choice else 0)

    def check(self) -> None:
        """Find every usage error before the first run."""
        for key in self.grid:
            if key in (*COMMON, "method", "plugins", "resume"):
                raise UsageError(f"grid: {key} is the same for all runs, and not to be chosen")
        for method in self.methods:
            if common := [key for key in parse(method).options if key in COMMON]:
                raise UsageError(f"method {method!r}: {common[0]} is the same for all methods of a comparison")
            check_simulation(self.experiment(method, 0))
            choice = self.choice(method)
            for values in choice.combinations().values() if choice else ():
                check_simulation(self.experiment(method, 0, {**values, "validation": VALIDATION_SHARE}))


#: called before every run with a label; returns what to call after every round of it
Announce = Callable[[str], Progress | None]


def compare(plan: Plan, folder: Path, announce: Announce) -> list[Summary]:
    """Run what is not finished; write `compare.json` and `compare.png` with all runs of the folder.

    Earlier runs of other methods or seeds stay in the table. A UsageError names one whose setting is another one.
    """
    runs = {run.folder: run for method in plan.methods for run in plan.runs(folder, method)}
    others = _others(plan, folder, runs)
    done = {place: summary for place, run in runs.items() if (summary := run.finished()) is not None}
    write_comparison([*done.values(), *others], folder)
    planned = [(run.experiment.config.method, run.experiment.config.seed) for run in runs.values()]
    write_json(folder / PLANNED, planned)
    for method in plan.methods:
        for summary in run_method(plan, method, folder, announce):
            done[run_folder(folder, method, summary["seed"])] = summary
            with suppress(OSError):  # a full disk: it is written again after the next run
                write_comparison([*done.values(), *others], folder)
    summaries = [*(done[place] for place in runs), *others]
    write_comparison(summaries, folder)
    plot_comparison(summaries, folder)
    return summaries


def run_method(plan: Plan, method: str, folder: Path, announce: Announce) -> Iterator[Summary]:
    """Run one method of the plan with every seed, with the best values of the grid if there is one."""
    choice = plan.choice(method)
    if choice:
        choice, failure = _chosen(plan, method, choice, folder, announce)
    for run in plan.runs(folder, method, choice):
        if choice and not choice.values:
            seed = run.experiment.config.seed
            yield {**failure, "seed": seed, "error": f"no value of its grid came through: {failure['error']}"}
        else:
            yield run.run_or_error(ENGINES[plan.engine], announce(f"{method}, seed {run.experiment.config.seed}"))


def _chosen(plan: Plan, method: str, choice: Choice, folder: Path, announce: Announce) -> tuple[Choice, Summary]:
    """Return the values with the best mean score on held-out training data, and the first failure.

    Values with which a run fails are out.
    """
    scores, failure = dict[str, float | None](), Summary()
    for text, values in choice.combinations().items():
        results = list[float]()
        for seed in range(plan.grid_seeds):
            experiment = plan.experiment(method, seed, {**values, "validation": VALIDATION_SHARE})
            place = folder / "grid" / f"{folder_name(method)}-{folder_name(text)}-seed{experiment.config.seed}"
            progress = announce(f"{method}, validating {text}, seed {experiment.config.seed}")
            summary = plan.kept(experiment, place).run_or_error(ENGINES[plan.engine], progress)
            score = summary.get(metric_of(summary))
            if "error" in summary or score is None:
                failure = failure or {"error": "it has no score", **summary}
                break
            results.append(float(score))
        scores[text] = fmean(results) if len(results) == plan.grid_seeds else None
    best = max(scores, key=lambda text: -inf if (score := scores[text]) is None else score)
    values = {} if scores[best] is None else choice.combinations()[best]
    return replace(choice, values=values, scores=scores), failure


def write_comparison(summaries: Sequence[Summary], folder: Path) -> None:
    """Write `compare.json`, which is whole at every moment."""
    write_json(make_folder(folder) / "compare.json", summaries)


def plot_comparison(summaries: Sequence[Summary], folder: Path) -> None:
    """Draw `compare.png` from the folders of the runs that finished, if any did."""
    curves: dict[str, list[Any]] = {}
    for summary in summaries:
        if "error" not in summary:
            place = run_folder(folder, summary["method"], summary["seed"])
            curves.setdefault(summary["method"], []).append(read_rounds(place))
    if curves:
        draw_or_warn(
            curves, folder / "compare.png", title_of(typical([each for each in summaries if "error" not in each]))
        )


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Return the folder of one run inside that of its comparison."""
    return folder / f"{folder_name(method)}-seed{seed}"


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of the runs of a comparison that have begun: first those of its table."""
    entries = read_json(folder / "compare.json") or []
    listed = [run_folder(folder, entry["method"], entry.get("seed", 0)) for entry in entries]
    return list(dict.fromkeys([*listed, *(path.parent for path in sorted(folder.glob("*-seed*/config.json")))]))


def _others(plan: Plan, folder: Path, runs: Mapping[Path, KeptRun]) -> list[Summary]:
    """Return the results that the folder has of runs that are not in the plan; refuse those of another setting."""
    entries = read_json(folder / "compare.json") or []
    listed = {run_folder(folder, entry["method"], entry["seed"]): entry for entry in entries}
    results = list[Summary]()
    for place in run_folders(folder):
        entry, summary = listed.get(place, {}), finished_summary(place)
        if place in runs or (summary is None and "error" not in entry):
            continue
        if differences := _other_setting(plan, place):
            if plan.overwrite:  # the run stays in its folder, and leaves the table
                continue
            raise UsageError(
                f"{place} has another setting: its {'; its '.join(differences)} ({OVERWRITE} leaves it out)"
            )
        results.append(entry if summary is None else summary)
    return results


def _other_setting(plan: Plan, place: Path) -> list[str]:
    """Return in which shared options a run differs from what the plan would give its method."""
    if not (options := options_in(place)):  # a method may fail before it has a folder
        return [LOST] if has_results(place) else []
    plugins = {"plugins": options["plugins"]} if options.get("plugins") else {}
    alike = replace(plan, options={**plan.options, "seed": options["seed"], **plugins})
    import_plugins(str(options.get("plugins", "")))
    if (strategy := options["method"].partition(":")[0].partition("+")[0]) not in REGISTRY:
        return [f"strategy {strategy!r} is not known here"]
    own = [key for key in options if key not in options_of(Config)]
    experiment = replace(alike.experiment(options["method"], 0), choice=plan.choice(options["method"]))
    return replace(alike.kept(experiment, place), unknown=own).differences()


def folder_name(text: str) -> str:
    """Return a text as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "+-=." else "_" for letter in text)
