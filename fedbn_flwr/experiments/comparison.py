"""Several methods on the same data, model and seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.kept_run import OVERWRITE, KeptRun, OtherRunError
from fedbn_flwr.experiments.method import Experiment, import_plugins, parse, resolve
from fedbn_flwr.experiments.output.plots import draw_or_warn, title_of
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.output.run_folder import (
    finished_summary,
    has_results,
    make_folder,
    read_json,
    read_rounds,
    write_json,
)
from fedbn_flwr.experiments.resources import check_simulation
from fedbn_flwr.plugins import extra
from fedbn_flwr.plugins.options import UsageError, convert, options_of
from fedbn_flwr.strategies import REGISTRY

VALIDATION_SHARE = 0.2
#: options that a comparison sets for all methods alike
COMMON = ("seed", "validation", "results-dir")
#: the runs that a comparison is to have, so that reports name those that have not begun
PLANNED = "planned.json"


@dataclass(frozen=True)
class Plan:
    """A plan of runs to compare: options, methods, seeds, learning rates to choose from, and the engine's name."""

    options: Mapping[str, Any]
    methods: Sequence[str]
    seeds: int = 1
    rates: Sequence[float] = ()
    engine: str = "stacked"
    #: whether other runs in the folders are replaced
    overwrite: bool = False

    def experiment(self, method: str, seed: int, **changes: Any) -> Experiment:
        """Resolve one run of the plan."""
        base = int(convert("seed", self.options.get("seed", 0), int))
        experiment = resolve({**self.options, "method": method, "seed": base + seed})
        return replace(experiment, config=replace(experiment.config, **changes))

    def kept(self, experiment: Experiment, place: Path, unknown: Sequence[str] = ()) -> KeptRun:
        """Return a run of the plan with its folder; it makes checkpoints by itself if options do not say when."""
        automatic = "checkpoint-every" not in self.options
        return KeptRun.of(experiment, self.engine, place, self.overwrite, automatic, unknown)

    def runs(self, folder: Path, method: str, **changes: Any) -> list[KeptRun]:
        """Return the runs of a method, one a seed, with their folders in that of the comparison."""
        unknown = ("lr",) if self.chooses_rate(method) and "lr" not in changes else ()
        experiments = [self.experiment(method, seed, **changes) for seed in range(self.seeds)]
        return [self.kept(each, run_folder(folder, method, each.config.seed), unknown) for each in experiments]

    def chooses_rate(self, method: str) -> bool:
        """Return whether there are learning rates to choose from, and the method does not name one."""
        return bool(self.rates) and "lr" not in parse(method)[2]

    def check(self) -> None:
        """Find every usage error before the first run."""
        for method in self.methods:
            if common := [key for key in parse(method)[2] if key in COMMON]:
                raise UsageError(f"method {method!r}: {common[0]} is the same for all methods of a comparison")
            check_simulation(self.experiment(method, 0))
            for rate in self.rates:
                check_simulation(self.experiment(method, 0, lr=rate, validation=VALIDATION_SHARE))


#: called before every run with a label; returns what to call after every round of it
Announce = Callable[[str], Progress | None]


def compare(plan: Plan, folder: Path, announce: Announce) -> list[Summary]:
    """Run what is not finished; write `compare.json` and `compare.png` with all runs of the folder.

    Earlier runs of other methods or seeds stay in the table. A UsageError names one whose setting is another one.
    """
    runs = {run.folder: run for method in plan.methods for run in plan.runs(folder, method)}
    before = _earlier(plan, folder, runs)
    _refuse_other_rates(plan, folder, runs)
    others = [entry for place, entry in before.items() if place not in runs]
    done = {place: before[place] for place, run in runs.items() if place in before and run.finished() is not None}
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
    """Run one method of the plan with every seed, at its best rate if there are rates to choose from."""
    chosen = _best_rate(plan, method, folder, announce)
    for run in plan.runs(folder, method, **({"lr": chosen["lr"]} if chosen else {})):
        summary = run.run_or_error(announce(f"{method}, seed {run.experiment.config.seed}"))
        yield {**summary, **({"lr-grid": chosen["grid"]} if chosen else {})}


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
        draw_or_warn(curves, folder / "compare.png", title_of(typical(summaries)))


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Return the folder of one run inside that of its comparison."""
    return folder / f"{folder_name(method)}-seed{seed}"


def typical(summaries: Sequence[Summary]) -> Summary:
    """Return a finished run whose partition is that of the clients: the centralized reference only if it is alone."""
    finished = [summary for summary in summaries if "error" not in summary]
    return next((summary for summary in finished if summary["partition"] != "union"), finished[0])


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of the runs of a comparison that have begun: first those of its table."""
    entries = read_json(folder / "compare.json") or []
    listed = [run_folder(folder, entry["method"], entry.get("seed", 0)) for entry in entries]
    return list(dict.fromkeys([*listed, *(path.parent for path in sorted(folder.glob("*-seed*/config.json")))]))


def _earlier(plan: Plan, folder: Path, runs: Mapping[Path, KeptRun]) -> dict[Path, Summary]:
    """Return the results that the folder has, by the run's folder; refuse those of another setting."""
    entries = read_json(folder / "compare.json") or []
    listed = {run_folder(folder, entry["method"], entry["seed"]): entry for entry in entries}
    results = dict[Path, Summary]()
    for place in run_folders(folder):
        entry, summary = listed.get(place, {}), finished_summary(place)
        if summary is None and "error" not in entry:
            continue
        if place not in runs and (differences := _other_setting(plan, place)):
            if plan.overwrite:  # the run stays in its folder, and leaves the table
                continue
            raise UsageError(
                f"{place} has another setting: its {'; its '.join(differences)} ({OVERWRITE} leaves it out)"
            )
        grid = {"lr-grid": entry["lr-grid"]} if "lr-grid" in entry else {}
        results[place] = entry if summary is None else {**summary, **grid}
    return results


def _refuse_other_rates(plan: Plan, folder: Path, runs: Mapping[Path, KeptRun]) -> None:
    """Refuse runs at a rate that was not chosen from the plan's rates, before these are tried."""
    entries = read_json(folder / "compare.json") or []
    listed = {run_folder(folder, entry["method"], entry["seed"]): entry for entry in entries}
    rates = {f"{rate:g}" for rate in plan.rates}
    for place, run in runs.items():
        if plan.overwrite or "lr" not in run.unknown or not has_results(place):
            continue
        used = f"{(read_json(place / 'config.json') or {})['options']['lr']:g}"
        grid = set(listed[place].get("lr-grid", [used])) if place in listed else rates
        if used not in rates or grid != rates:
            text = f"{place} holds another run: its lr is {used}, from {', '.join(sorted(grid))}"
            raise OtherRunError(f"{text} and not from {', '.join(sorted(rates))} ({OVERWRITE} replaces it)")


def _other_setting(plan: Plan, place: Path) -> list[str]:
    """Return in which shared options a run differs from what the plan would give its method."""
    options = (read_json(place / "config.json") or {}).get("options")
    if not options:
        return []
    plugins = {"plugins": options["plugins"]} if options.get("plugins") else {}
    alike = replace(plan, options={**plan.options, "seed": options["seed"], **plugins})
    import_plugins(str(options.get("plugins", "")))
    if (strategy := options["method"].partition(":")[0].partition("+")[0]) not in REGISTRY:
        return [f"strategy {strategy!r} is not known here"]
    own = [key for key in options if key not in options_of(Config)]
    rate = ["lr"] if plan.chooses_rate(options["method"]) else []
    return alike.kept(alike.experiment(options["method"], 0), place, [*own, *rate]).differences()


def _best_rate(plan: Plan, method: str, folder: Path, announce: Announce) -> dict[str, Any]:
    """The rate with the best score on a validation split of the training data, at the first seed."""
    if not plan.chooses_rate(method):
        return {}
    grid = {}
    for rate in plan.rates:
        experiment = plan.experiment(method, 0, lr=rate, validation=VALIDATION_SHARE)
        run = plan.kept(experiment, folder / "lr-grid" / f"{folder_name(method)}-lr{rate:g}")
        summary = run.run_or_error(announce(f"{method}, validating lr {rate:g}"))
        grid[rate] = summary.get(metric_of(summary), 0.0)
    return {
        "lr": max(grid, key=lambda rate: grid[rate]),
        "grid": {f"{rate:g}": value for rate, value in grid.items()},
    }


@dataclass(frozen=True)
class Line:
    """The results of one method over all its seeds."""

    method: str
    mean: float
    deviation: float
    #: mean paired difference to the first method, and half the width of its 95 % interval
    difference: float
    half_width: float
    summary: Summary


def metric_of(summary: Summary) -> str:
    """Return the score by which the methods of a comparison are compared."""
    return str(summary.get("metric", "accuracy"))


def lines(summaries: Sequence[Summary], key: str = "") -> list[Line]:
    """Return a line for each method, by default of what they are compared by; differences are paired by seed."""
    key = key or metric_of(summaries[0])
    by_method: dict[str, dict[int, Summary]] = {}
    for summary in summaries:
        by_method.setdefault(summary["method"], {})[summary["seed"]] = summary
    first = next(iter(by_method.values()))
    return [_line(method, runs, first, key) for method, runs in by_method.items()]


def _line(method: str, runs: Mapping[int, Summary], first: Mapping[int, Summary], key: str) -> Line:
    values = {seed: run.get(key, np.nan) for seed, run in runs.items()}
    differences = [value - first[seed].get(key, np.nan) for seed, value in values.items() if seed in first]
    mean, deviation, _ = _spread(list(values.values()))
    difference, _, half_width = _spread(differences)
    return Line(method, mean, deviation, difference, half_width, list(runs.values())[-1])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, the standard deviation, and half the width of the mean's 95 % interval."""
    if len(values) < 2:
        return (values[0] if values else np.nan), 0.0, 0.0
    with extra("cli"):  # takes seconds to import, and only the last table needs it
        from scipy import stats

    deviation = float(np.std(values, ddof=1))
    half_width = deviation / len(values) ** 0.5 * float(stats.t.ppf(0.975, len(values) - 1))
    return float(np.mean(values)), deviation, half_width


def folder_name(text: str) -> str:
    """Return a text as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "+-=." else "_" for letter in text)
