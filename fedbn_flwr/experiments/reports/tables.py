"""The tables of a report."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedbn_flwr.experiments.comparison import lines
from fedbn_flwr.experiments.recipes.quantities import columns_of, heading_of
from fedbn_flwr.experiments.recipes.recipe import Setting
from fedbn_flwr.experiments.recipes.table import Key, Row, Value, rows_of
from fedbn_flwr.experiments.reports.sources import Run, Source, score_of
from fedbn_flwr.traffic.counting_grid import MEGABYTE

#: said of results that have one run each
WEAK = "One seed: a difference may be chance."


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and the number that it is sorted by if it is one."""

    text: str
    number: float | None = None
    #: what stands behind the number's plus-minus sign
    spread: float | None = None


@dataclass(frozen=True)
class Table:
    """A table whose columns can be sorted by."""

    name: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    #: columns of numbers
    numeric: frozenset[int] = field(default_factory=frozenset)
    footer: str = ""


def result_table(source: Source, values: dict[Key, Value]) -> Table:
    """Return a row for each method: its score, the paired difference, and other numbers beside those of the paper."""
    places = [place.place for place in source.recipe.reported]
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for item in rows_of(source.results, values):
        cells.setdefault((item.setting, item.method), {})[item.column] = item
    score = score_of(source.runs)
    columns = sorted({column: None for rows in cells.values() for column in rows if column}, key=lambda c: c != score)
    columns = columns or [score]
    headings = ["setting", "method"]
    for column in columns:
        headings += [heading_of(column), *(["difference"] if column == columns[0] else [])]
        headings += places if column == columns[0] else [f"{heading_of(column)} ({place})" for place in places]
    differences, rows = _differences(source, columns[0]), []
    for (setting, method), by_column in cells.items():
        state = next(iter(by_column.values())).failure or _state(source, setting, method)
        row = [Cell(setting), Cell(method)]
        for column in columns:
            here = by_column.get(column)
            number = _number(here) if here and here.text and not here.failure else Cell("")
            if column == columns[0]:
                row += [number if number.text else Cell(state), differences.get((setting, method), Cell(""))]
            else:
                row.append(number)
            row += [Cell(text, _leading(text)) for text in (here.printed if here else [""] * len(places))]
        seeds = max((item.here.seeds for item in by_column.values() if item.here), default=0)
        rows.append([*row, Cell(str(seeds) if seeds else "", seeds)])
    counted = {int(row[-1].text) for row in rows if row[-1].text}
    most, alike = max(counted, default=0), len(counted) == 1
    shown = [row[:-1] for row in rows] if alike else rows
    caption = f"{heading_of(columns[0]).capitalize()}: mean"
    caption += f" of {most} runs" if alike and most > 1 else ""
    if most > 1:
        caption += " ± standard deviation; difference to the first method, paired by seed, ± half its 95 % interval"
    caption += "; beside it the numbers that are printed" if places else ""
    weak = WEAK if counted == {1} and any(cell.spread is None for cell in differences.values()) else ""
    last = [] if alike else ["runs"]
    numeric = set(range(2, len(headings) + len(last)))
    return _without_empty("results", caption, [*headings, *last], shown, numeric, weak)


def _number(row: Row) -> Cell:
    spread = row.here.deviation if row.here and row.here.seeds > 1 else None
    return Cell(row.text, row.here.mean if row.here else None, spread)


def cost_table(source: Source) -> Table:
    """Return what the finished runs sent and how long they took, as means over seeds."""
    headings = ["setting", "method", "rounds", "exchanges", "MB sent", "MB a round, as papers count", "seconds"]
    rows = []
    for setting, label in _cells(source):
        runs = [run.summary for run in source.runs_of(setting, label) if run.state == "finished" and run.summary]
        if runs:
            means = [_mean([run.get(key) for run in runs]) for key in ("rounds", "exchanges")]
            megabytes = _mean([_per(run.get("payload-bytes"), MEGABYTE) for run in runs])
            paper = _mean([_per(run.get("paper-bytes"), MEGABYTE * (run.get("rounds") or 1)) for run in runs])
            numbers = [*means, megabytes, paper, _mean([run.get("seconds") for run in runs])]
            cells = [_count(number, digits) for number, digits in zip(numbers, (0, 0, 1, 2, 1), strict=True)]
            rows.append([Cell(setting), Cell(label), *cells])
    return _without_empty("costs", "What the runs sent, and their time", headings, rows, {2, 3, 4, 5, 6})


def run_table(source: Source) -> Table:
    """Return the state of every run, and what came of it."""
    score = score_of(source.runs)
    headings = ["setting", "method", "seed", "state", "rounds done", "of", "learning rate"]
    headings += [heading_of(score), "exchanges", "MB sent", "seconds", "folder"]
    rows = []
    for run in source.runs:
        done, total = len(run.rows), run.rounds
        progress = [Cell(f"{done:,}", done), Cell(f"{total:,}", total) if total else Cell("")]
        state = f"failed: {run.error}" if run.error else run.state
        names = [Cell(run.setting), Cell(run.label), Cell(str(run.seed), run.seed), Cell(state)]
        rate, ended = run.options.get("lr"), run.summary if run.state == "finished" and run.summary else {}
        numbers = [_per(ended.get(score), 0.01), ended.get("exchanges"), _per(ended.get("payload-bytes"), MEGABYTE)]
        counted = zip([*numbers, ended.get("seconds")], (2, 0, 1, 1), strict=True)
        results = [Cell(f"{rate:g}", rate) if rate else Cell(""), *(_count(*each) for each in counted)]
        rows.append([*names, *progress, *results, Cell(run.folder.name)])
    return _without_empty("runs", "All runs", headings, rows, {2, *range(4, 11)})


def curve_table(source: Source) -> Table:
    """Return the score of every run over its rounds, exchanges, bytes and seconds."""
    score = score_of(source.runs)
    headings = ["setting", "method", "seed", "round", heading_of(score), "exchanges", "MB sent", "seconds"]
    rows = []
    for run in source.runs:
        names = [Cell(run.setting), Cell(run.label), Cell(str(run.seed), run.seed)]
        exchanges, sent, seconds = 0, 0, 0.0
        for row in run.rows:
            exchanges += row.get("exchanges") or 0
            sent += sum(row.get(f"payload-bytes-{way}") or 0 for way in ("down", "up"))
            seconds += row.get("seconds") or 0.0
            if row.get(score) is not None:
                numbers = zip((100 * row[score], exchanges, sent / MEGABYTE, seconds), (2, 0, 1, 1), strict=True)
                rows.append([*names, Cell(str(row["round"]), row["round"]), *(_count(*each) for each in numbers)])
    return _without_empty("curves", "The score over the rounds", headings, rows, set(range(2, 8)))


def counts(runs: Sequence[Run]) -> str:
    """Return how many runs are in each state."""
    states = Counter(run.state for run in runs)
    named = [f"{states[state]} {state}" for state in ("finished", "failed", "unfinished", "waiting") if states[state]]
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {', '.join(named)}"


def _differences(source: Source, column: str) -> dict[tuple[str, str], Cell]:
    """Return the paired difference of each cell to the first finished method of its setting."""
    cells: dict[tuple[str, str], Cell] = {}
    for setting in source.recipe.settings:
        summaries = [summary for summary in _flat(source, setting) if column in summary]
        compared = lines(summaries, column) if summaries else []
        for line in compared if len(compared) > 1 else ():
            half = f" ± {line.half_width:.2f}" if line.half_width else ""
            cell = Cell(f"{line.difference:+z.2f}{half}", line.difference, line.half_width or None)
            if not math.isnan(line.difference):
                cells[setting.name, line.method] = Cell("baseline", 0.0) if line is compared[0] else cell
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
    name: str,
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    numeric: Collection[int],
    footer: str = "",
) -> Table:
    """Return a table without the columns in which no row has a text."""
    kept = [index for index in range(len(headings)) if any(row[index].text for row in rows)]
    shown = [[row[index] for index in kept] for row in rows]
    numbers = frozenset(position for position, index in enumerate(kept) if index in numeric)
    return Table(name, caption, [headings[index] for index in kept], shown, numbers, footer)


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
