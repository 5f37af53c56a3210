"""The tables of a report."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedbn_flwr.experiments.comparison import lines
from fedbn_flwr.experiments.recipes.quantities import columns_of
from fedbn_flwr.experiments.recipes.recipe import Setting
from fedbn_flwr.experiments.recipes.table import Key, Value, rows_of
from fedbn_flwr.experiments.reports.sources import Run, Source


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and the number that it is sorted by if it is one."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class Table:
    """A table whose columns can be sorted by."""

    name: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    #: columns of numbers
    numeric: frozenset[int] = field(default_factory=frozenset)


def result_table(source: Source, values: dict[Key, Value]) -> Table:
    """Return means, deviations and paired differences of the runs, beside the numbers of the paper."""
    recipe, differences = source.recipe, _differences(source)
    places = [place.place for place in recipe.reported]
    headings = ["setting", "method", "quantity", "here", "deviation", "runs", "difference", *places]
    rows = []
    for row in rows_of(source.results, values):
        here, number = row.here, row.text.partition(" ")[0]
        state = row.failure or ("" if number else _state(source, row.setting, row.method))
        shown = Cell(state) if state else Cell(number, here.mean if here else None)
        deviation = Cell(f"± {here.deviation:.2f}", here.deviation) if here and here.seeds > 1 else Cell("")
        count = Cell(str(here.seeds), here.seeds) if here else Cell("")
        difference = differences.get((row.setting, row.method, row.column), Cell(""))
        printed = [Cell(text, _leading(text)) for text in row.printed]
        rows.append([*map(Cell, (row.setting, row.method, row.column)), shown, deviation, count, difference, *printed])
    quantities = {row[2].text for row in rows}
    if len(quantities) == 1:
        rows = [[*row[:2], Cell(""), *row[3:]] for row in rows]
    caption = quantities.pop().replace("-", " ").capitalize() if len(quantities) == 1 else "Results"
    caption += ": mean and standard deviation of the runs, the difference to the first method paired by seed"
    caption += " with half its 95 % interval, and the numbers that are printed" if places else ""
    return _without_empty("results", caption, headings, rows, {3, 4, 5, 6, *range(7, 7 + len(places))})


def cost_table(source: Source) -> Table:
    """Return what the finished runs sent and how long they took, as means over seeds."""
    headings = ["setting", "method", "rounds", "exchanges", "MB sent", "MB a round, as papers count", "seconds"]
    rows = []
    for setting, label in _cells(source):
        runs = [run.summary for run in source.runs_of(setting, label) if run.state == "finished" and run.summary]
        if runs:
            means = [_mean([run.get(key) for run in runs]) for key in ("rounds", "exchanges")]
            megabytes = _mean([_per(run.get("payload-bytes"), 2**20) for run in runs])
            paper = _mean([_per(run.get("paper-bytes"), 2**20 * (run.get("rounds") or 1)) for run in runs])
            numbers = [*means, megabytes, paper, _mean([run.get("seconds") for run in runs])]
            cells = [_count(number, digits) for number, digits in zip(numbers, (0, 0, 1, 2, 1), strict=True)]
            rows.append([Cell(setting), Cell(label), *cells])
    return _without_empty("costs", "What the runs sent, and their time", headings, rows, {2, 3, 4, 5, 6})


def run_table(source: Source) -> Table:
    """Return the state of every run."""
    headings = ["setting", "method", "seed", "state", "rounds done", "of", "folder"]
    rows = []
    for run in source.runs:
        done, total = len(run.rows), run.rounds
        progress = [Cell(f"{done:,}", done), Cell(f"{total:,}", total) if total else Cell("")]
        state = f"failed: {run.error}" if run.error else run.state
        names = [Cell(run.setting), Cell(run.label), Cell(str(run.seed), run.seed), Cell(state)]
        rows.append([*names, *progress, Cell(run.folder.name)])
    return _without_empty("runs", "All runs", headings, rows, {2, 4, 5})


def counts(runs: Sequence[Run]) -> str:
    """Return how many runs are in each state."""
    states = Counter(run.state for run in runs)
    named = [f"{states[state]} {state}" for state in ("finished", "failed", "unfinished", "waiting") if states[state]]
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {', '.join(named)}"


def _differences(source: Source) -> dict[Key, Cell]:
    """Return the paired difference of each cell to the first finished method of its setting."""
    cells: dict[Key, Cell] = {}
    for setting in source.recipe.settings:
        summaries = list(_flat(source, setting))
        for column in dict.fromkeys(key for summary in summaries for key in summary if key not in ("method", "seed")):
            compared = lines([summary for summary in summaries if column in summary], column)
            for line in compared:
                half = f" ± {line.half_width:.2f}" if line.half_width else ""
                cell = Cell(f"{line.difference:+.2f}{half}", line.difference)
                first = line is compared[0]
                if not math.isnan(line.difference) and len(compared) > 1:
                    cells[setting.name, line.method, column] = Cell("baseline", 0.0) if first else cell
    return cells


def _flat(source: Source, setting: Setting) -> Iterator[dict[str, Any]]:
    """Return the columns of every finished run of a setting."""
    rounds = source.record.rounds if source.record else 1
    for label in source.recipe.methods_of(setting):
        for summary in source.results.finished(setting.name, label):
            columns: dict[str, Any] = {"method": label, "seed": summary.get("seed", 0)}
            for quantity in source.recipe.quantities:
                columns |= columns_of(summary, quantity, rounds)
            yield columns


def _without_empty(
    name: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], numeric: set[int]
) -> Table:
    """Return a table without the columns in which no row has a text."""
    texts = [{row[index].text for row in rows} for index in range(len(headings))]
    kept = [index for index, column in enumerate(texts) if column - {""}]
    shown = [[row[index] for index in kept] for row in rows]
    return Table(
        name,
        caption,
        [headings[index] for index in kept],
        shown,
        frozenset(position for position, index in enumerate(kept) if index in numeric),
    )


def _cells(source: Source) -> list[tuple[str, str]]:
    return [(setting.name, label) for setting, label in source.recipe.cells()]


def _state(source: Source, setting: str, label: str) -> str:
    states = Counter(run.state for run in source.runs_of(setting, label))
    return next((state for state in ("failed", "unfinished", "waiting") if states[state]), "not recorded")


def _leading(text: str) -> float | None:
    return float(text.partition("±")[0]) if text else None


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return fmean(numbers) if numbers else None


def _per(value: Any, unit: float) -> float | None:
    return value / unit if isinstance(value, int | float) else None


def _count(number: float | None, digits: int) -> Cell:
    return Cell("") if number is None else Cell(f"{number:,.{digits}f}", number)
