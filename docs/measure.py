"""Run recipes, and record their runs in docs/measured: `python docs/measure.py here/factorial`.

In each setting of a recipe: first the rates of its grid on held-out data, with two seeds; then as
many seeds as the recipe has, from 10 on, which no choice has seen, each with all methods. Where the
best rate is the least or the largest of those that were tried, the next one is tried. A recipe
without a grid has its own rate, and seeds from 0 on. What has a row is not run again, also after a
stop at any moment.
"""

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_results import best_rate

from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.recipes.schema import read_recipe
from fedbn_flwr.experiments.runs import Run, alone_in
from fedbn_flwr.experiments.study import VALIDATION_SHARE, Setting, Study, checked, quiet

TABLES, RESULTS = Path(__file__).parent / "measured", Path("results")
CHOOSING, FIRST = (0, 1), 10
#: the columns of rates.csv
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def rows(name: str, **values: object) -> list[dict[str, str]]:
    """Return the rows of a table that have these values."""
    with (TABLES / f"{name}.csv").open() as file:
        return [
            row
            for row in csv.DictReader(file)
            if all(row[key] == str(value) for key, value in values.items())
        ]


def append(name: str, new: Sequence[Mapping[str, object]]) -> None:
    """Append rows to a table; columns that they lack are empty."""
    with (TABLES / f"{name}.csv").open("r+") as file:
        columns = next(csv.reader([file.readline()]))
        file.seek(0, 2)
        csv.DictWriter(file, columns, lineterminator="\n").writerows(new)


def commit() -> str:
    """Return the commit whose code makes the rows."""
    command = ("git", "-c", "safe.directory=*", "rev-parse", "--short=10", "HEAD")
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()


def percent(summary: Mapping[str, Any]) -> str:
    """Return the accuracy of a run; empty if training diverged."""
    return "" if "diverged" in summary else f"{100 * summary['accuracy']:.2f}"


@dataclass(frozen=True)
class Cell:
    """A method in a setting of a recipe."""

    study: Study
    setting: Setting
    label: str
    folder: Path

    @property
    def choosing(self) -> dict[str, float]:
        """Return the options of runs that choose: on held-out data, of which only the end
        counts.
        """
        return {"validation": VALIDATION_SHARE, "evaluate-every": self.setting.options["rounds"]}

    def run(self, seed: int, rate: float, **changes: float) -> tuple[Path, dict[str, Any]]:
        """Run what is not finished; return the folder and its summary."""
        experiment = self.study.experiment(
            self.setting, self.label, seed, {"lr": rate, "workers": 1, **changes}
        )
        run = Run(experiment, "stacked", self.folder, self.setting.labels, self.label).at(
            self.folder
        )
        summary = run.train_or_fail(ENGINES["stacked"])
        if "failed" in summary and "diverged" not in summary:
            raise SystemExit(f"{run.folder}: {summary['failed']}")
        name = f"{run.name}, lr={rate:g}"
        if changes:
            name += ", held out"
        print(f"{name}: {percent(summary) or 'diverged'}, {summary['seconds']:.0f} s", flush=True)
        return run.folder, summary


def held_out(key: Mapping[str, str], seed: int) -> dict[float, float]:
    """Return the accuracies on held-out data by rate; NaN where training diverged."""
    cells = [cell for row in rows("rates", **key, seeds=seed) for cell in row.items()]
    scores = [
        (rate, score.replace("diverged", "nan"))
        for rate, score in cells
        if rate[0].isdigit() and score
    ]
    return {float(rate): float(score) for rate, score in scores}


def chosen_rate(cell: Cell, key: Mapping[str, str]) -> float:
    """Return the best rate, after the runs that are missing, or the recipe's own.

    One at the edge only if no next one can be tried.
    """
    if not cell.study.grid:
        return float(cell.setting.options["lr"])
    rates = sorted(map(float, cell.study.grid["lr"]))
    while True:
        for seed in CHOOSING:
            missing = [rate for rate in rates if rate not in held_out(key, seed)]
            found = {rate: cell.run(seed, rate, **cell.choosing)[1] for rate in missing}
            scores = {
                f"{rate:g}": percent(summary) or "diverged" for rate, summary in found.items()
            }
            append("rates", [{**key, "seeds": seed, **scores}] if scores else [])
        best = best_rate({rate: [held_out(key, seed)[rate] for seed in CHOOSING] for rate in rates})
        beyond = RATES.index(best)
        if best == rates[-1]:
            beyond += 1
        elif best == rates[0]:
            beyond -= 1
        if not 0 <= beyond < len(RATES) or RATES[beyond] in rates:
            return best
        rates = sorted([*rates, RATES[beyond]])


def record(cell: Cell, key: Mapping[str, str], seed: int, rate: float) -> None:
    """Run a cell with a seed, and append the rows of its curve and its own."""
    place, summary = cell.run(seed, rate)
    named = {"setting": f"{key['recipe']}, {cell.setting.name}", "method": cell.label, "seed": seed}
    exchanges, sent, spent, curve = 0, 0, dict[str, object](), []
    for row in read_rounds(place):
        exchanges += row["exchanges"]
        sent += row["payload-bytes-down"] + row["payload-bytes-up"]
        spent = {"exchanges": exchanges, "MB sent": f"{sent / 10**6:.2f}"}
        if "accuracy" in row:
            curve.append({**named, "round": row["round"], "accuracy, %": percent(row), **spent})
    append("curves", curve)
    ended = {"accuracy, %": percent(summary), "state": "diverged" if "diverged" in summary else ""}
    append(
        "runs",
        [{**key, "seed": seed, "learning rate": f"{rate:g}", **ended, **spent, "commit": commit()}],
    )


def measure(name: str) -> None:
    """Run what the tables lack of a recipe, setting by setting, and there seed by seed."""
    recipe = read_recipe(name)
    checked(recipe.study, RESULTS)
    cells = [Cell(recipe.study, *each, RESULTS / name) for each in recipe.study.cells()]
    for setting in recipe.study.settings:
        place = {"recipe": recipe.name.removeprefix("here/"), "setting": setting.name}
        keys = [
            (cell, {**place, "method": cell.label}) for cell in cells if cell.setting == setting
        ]
        chosen = [(cell, key, chosen_rate(cell, key)) for cell, key in keys]
        first = FIRST if recipe.study.grid else 0
        for seed in range(first, first + recipe.study.seeds):
            for cell, key, rate in chosen:
                if not rows("runs", **key, seed=seed):
                    record(cell, key, seed, rate)


if __name__ == "__main__":
    with alone_in(RESULTS), quiet():
        for recipe_name in sys.argv[1:]:
            measure(recipe_name)
