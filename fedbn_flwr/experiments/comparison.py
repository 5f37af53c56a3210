"""Several methods on the same data, model and seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.experiments.engines import Engine
from fedbn_flwr.experiments.method import Experiment, parse, resolve
from fedbn_flwr.experiments.output.plots import plot_curves, title_of
from fedbn_flwr.experiments.output.recorder import Progress, Summary, diverged
from fedbn_flwr.experiments.output.run_folder import as_json, read_rounds
from fedbn_flwr.experiments.resources import check_simulation
from fedbn_flwr.plugins import extra
from fedbn_flwr.plugins.options import UsageError, convert
from fedbn_flwr.strategies import CannotTrainError

VALIDATION_SHARE = 0.2
#: options that a comparison sets for all methods alike
COMMON = ("seed", "validation", "results-dir")


@dataclass(frozen=True)
class Plan:
    """A plan of runs to compare: options, methods, seeds, and learning rates to choose from."""

    options: Mapping[str, Any]
    methods: Sequence[str]
    seeds: int = 1
    rates: Sequence[float] = ()

    def experiment(self, method: str, seed: int, **changes: Any) -> Experiment:
        """Resolve one run of the plan."""
        base = int(convert("seed", self.options.get("seed", 0), int))
        experiment = resolve({**self.options, "method": method, "seed": base + seed})
        return replace(experiment, config=replace(experiment.config, **changes))

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


def compare(plan: Plan, engine: Engine, folder: Path, announce: Announce) -> list[Summary]:
    """Run everything; write `compare.json` and `compare.png` beside the runs' own folders."""
    summaries: list[Summary] = []
    for method in plan.methods:
        for summary in run_method(plan, method, engine, folder, announce):
            summaries.append(summary)
            (folder / "compare.json").write_text(as_json(summaries, indent=2) + "\n")
    plot_comparison(summaries, folder)
    return summaries


def run_method(plan: Plan, method: str, engine: Engine, folder: Path, announce: Announce) -> Iterator[Summary]:
    """Run one method of the plan with every seed, at its best rate if there are rates to choose from."""
    chosen = _best_rate(plan, method, engine, folder, announce)
    for seed in range(plan.seeds):
        experiment = plan.experiment(method, seed, **({"lr": chosen["lr"]} if chosen else {}))
        place = run_folder(folder, method, experiment.config.seed)
        summary = run_or_error(engine, experiment, place, announce(f"{method}, seed {experiment.config.seed}"))
        yield {**summary, **({"lr-grid": chosen["grid"]} if chosen else {})}


def plot_comparison(summaries: Sequence[Summary], folder: Path) -> None:
    """Draw `compare.png` from the folders of the runs that finished, if any did."""
    curves: dict[str, list[Any]] = {}
    for summary in summaries:
        if "error" not in summary:
            place = run_folder(folder, summary["method"], summary["seed"])
            curves.setdefault(summary["method"], []).append(read_rounds(place))
    if curves:
        plot_curves(curves, folder / "compare.png", title_of(_typical(summaries)))


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Return the folder of one run inside that of its comparison."""
    return folder / f"{folder_name(method)}-seed{seed}"


def _typical(summaries: Sequence[Summary]) -> Summary:
    """A finished run, not the centralized reference if there is another: it has one node with all data."""
    finished = [summary for summary in summaries if "error" not in summary]
    return next((summary for summary in finished if summary["partition"] != "union"), finished[0])


def run_or_error(engine: Engine, experiment: Experiment, place: Path, progress: Progress | None) -> Summary:
    """Return a run's summary; of a method that cannot train on these data, or diverges, the error."""
    try:
        return engine(experiment, place, progress)
    except CannotTrainError as error:
        config = experiment.config
        named = {"method": config.method, "seed": config.seed, "lr": config.lr}
        return {**named, "error": str(error), **diverged(error)}


def _best_rate(plan: Plan, method: str, engine: Engine, folder: Path, announce: Announce) -> dict[str, Any]:
    """The rate with the best score on a validation split of the training data, at the first seed."""
    if not plan.rates or "lr" in parse(method)[2]:
        return {}
    grid = {}
    for rate in plan.rates:
        experiment = plan.experiment(method, 0, lr=rate, validation=VALIDATION_SHARE)
        place = folder / "lr-grid" / f"{folder_name(method)}-lr{rate:g}"
        summary = run_or_error(engine, experiment, place, announce(f"{method}, validating lr {rate:g}"))
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
