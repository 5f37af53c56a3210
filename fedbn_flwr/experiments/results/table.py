"""Tables of runs: the one place where rows become cells. `show.py` has the forms of a table.

A new column is a line of `COLUMNS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbn_flwr.experiments.choice import ABOUT_EDGE, EDGE, chosen_of
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.results.rows import (
    ADAPTED,
    Row,
    about_absent,
    finished,
    metric_of,
    options_of_run,
    outcome_of,
    records,
    rounds_of,
    rounds_run,
    score_of,
    typical,
)
from fedbn_flwr.experiments.results.values import AVERAGE, Value, heading_of, is_share, number_text, scale_of, values_of
from fedbn_flwr.traffic.counting_grid import MEGABYTE

#: digits of errors, which may be small
ERROR_DIGITS = 4
#: said of results that have one run each
WEAK = "One seed: a difference may be chance."


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and the number that it is sorted by if it is one."""

    text: str = ""
    number: float | None = None
    #: what stands behind the number's plus-minus sign
    spread: float | None = None


@dataclass(frozen=True)
class Table:
    """A table whose columns can be sorted by; its lines are cells by heading."""

    name: str
    caption: str
    lines: Sequence[Mapping[str, Cell]]
    footer: Sequence[str] = ()

    @cached_property
    def headings(self) -> list[str]:
        """The columns in which a line has a text."""
        names = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in names if any(line[name].text for line in self.lines if name in line)]

    @cached_property
    def numeric(self) -> set[str]:
        """The columns of numbers."""
        return {name for line in self.lines for name, cell in line.items() if cell.number is not None}

    def column(self, name: str) -> list[Cell]:
        """Return the cells below a heading."""
        return [line.get(name, Cell()) for line in self.lines]

    def cells(self) -> list[list[Cell]]:
        """Return the lines as they are read."""
        return [[line.get(name, Cell()) for name in self.headings] for line in self.lines]


@dataclass(frozen=True)
class Entry:
    """What a line is made of: the runs of one method in one setting, or one of its runs."""

    rows: Sequence[Row]
    setting: str
    label: str
    #: the method's values by column
    values: Mapping[str, Value]
    #: the columns of the table, the one that the line is about first
    columns: Sequence[str]
    #: the method that differences are to; empty if there is no other one
    baseline: str
    paper: Paper
    digits: int

    @property
    def failure(self) -> str:
        """How a run failed, in words; empty if none did."""
        return next((outcome_of(row) for row in self.rows if row["state"] == "failed"), "")

    def value(self, column: str, has_spread: bool = True) -> Cell:
        """Return the number of the runs, with as many digits as the paper prints."""
        value, digits = self.values.get(column), self.digits
        if value is None or self.failure:
            return Cell()
        for number in filter(None, self.paper.numbers(self.label, self.setting, column).values()):
            digits = max(digits, len(number.printed.partition(" ")[0].partition(".")[2]))
        spread = value.deviation if has_spread and value.number > 1 else None
        return Cell(number_text(value.mean, spread, digits), value.mean, spread)

    def score(self, missing: str = "not recorded") -> Cell:
        """Return the number that the line is about, or why there is none."""
        states = {row["state"] for row in self.rows}
        state = next((each for each in ("unfinished", "waiting") if each in states), missing)
        number = self.value(self.columns[0])
        return number if number.text else Cell(self.failure or state)

    def difference(self, baseline: Cell) -> Cell:
        """Return the paired difference to the first method, which itself has the cell `baseline`."""
        value = self.values.get(self.columns[0])
        if value is None or self.failure or not self.baseline or not value.pairs:
            return Cell()
        half = value.half_width if value.pairs > 1 else None
        text = number_text(value.difference, half, self.digits, "+")
        return baseline if self.label == self.baseline else Cell(text, value.difference, half)

    def printed(self, column: str, heading: str = "{}") -> dict[str, Cell]:
        """Return the paper's numbers; `heading` has a place for their place."""
        numbers = self.paper.numbers(self.label, self.setting, column)
        return {heading.format(at): Cell(n.printed, n.mean) if n else Cell() for at, n in numbers.items()}

    def others(self) -> dict[str, Cell]:
        """Return the numbers that the line is not about, each with the paper's."""
        cells = dict[str, Cell]()
        for column in self.columns[1:]:
            name = heading_of(column)
            cells |= {name: self.value(column), **self.printed(column, name + " ({})")}
        return cells

    def domains(self) -> dict[str, Cell]:
        """Return the accuracy of every domain, and their mean."""
        names: Mapping[str, float] = next((row["domain-accuracy"] for row in self.rows if "domain-accuracy" in row), {})
        cells = {name: self.value(name, has_spread=False) for name in names}
        return {**cells, "mean": self.value(AVERAGE, has_spread=False)}

    def unseen(self) -> dict[str, Cell]:
        """Return the scores on a domain that nobody trained with, each with half its 95 % interval."""
        values = {name: replace(value, deviation=value.interval) for name, value in self.values.items()}
        entry, names = replace(self, values=values), ("accuracy-mean-bn", *ADAPTED)
        others = {
            name.replace("accuracy-", "").replace("-bn", "-BN").replace("-", " "): entry.value(name) for name in names
        }
        return {"as it is": entry.score(), **others}

    def mean(self, key: str, unit: float = 1, digits: int = 0, of: str = "") -> Cell:
        """Return the mean over the finished runs of a number of their summaries, for each of another one."""
        ended = [{**row, "rounds": rounds_run(row)} for row in finished(self.rows)]
        runs = [row for row in ended if isinstance(row.get(key), int | float) and (not of or row.get(of))]
        return count(fmean(row[key] / unit / (row[of] if of else 1) for row in runs) if runs else None, digits)

    def recorded(self) -> list[str]:
        """Return the columns in which the runs or the paper have a number; at least one."""
        printed = self.paper.columns(self.label, self.setting)
        return [name for name in self.columns if name in self.values or name in printed] or [self.columns[0]]

    def chosen(self) -> Cell:
        """Return the values that were chosen for the runs."""
        return Cell(next(filter(None, map(chosen_of, finished(self.rows))), ""))

    def rate(self) -> Cell:
        """Return the learning rate of the runs."""
        rate = self.rows[0].get("lr") or options_of_run(self.rows[0]).get("lr")
        return Cell(f"{rate:g}", rate) if rate else Cell()


def count(number: float | None, digits: int = 0) -> Cell:
    """Return a number as a cell; an empty one for None."""
    return Cell() if number is None else Cell(f"{number:,.{digits}f}", number)


def _state(row: Row) -> Cell:
    return Cell(f"failed: {row['error']}" if row["error"] else row["state"])


def _of_run(entry: Entry) -> dict[str, Cell]:
    metric = metric_of(entry.rows[0])
    digits = 2 if is_share(metric) else ERROR_DIGITS
    return {heading_of(metric): entry.mean(metric, 1 / scale_of(metric), digits)}


#: what a column has in a line: cells by heading. Lines of single runs have one row
COLUMNS: dict[str, Callable[[Entry], dict[str, Cell]]] = {
    "setting": lambda entry: {"setting": Cell(entry.setting)},
    "method": lambda entry: {"method": Cell(entry.label)},
    "quantity": lambda entry: {"quantity": Cell(entry.columns[0] if len(entry.columns) > 1 else "")},
    "score": lambda entry: {heading_of(entry.columns[0]): entry.score()},
    "here": lambda entry: {"here": entry.score("")},
    "difference": lambda entry: {"difference": entry.difference(Cell("baseline", 0.0))},
    "versus": lambda entry: {f"vs {entry.baseline}": entry.difference(Cell())},
    "printed": lambda entry: entry.printed(entry.columns[0]),
    "others": Entry.others,
    "domains": Entry.domains,
    "personal": lambda entry: {"personal": entry.value("accuracy-personal", has_spread=False)},
    "mean BN": lambda entry: {"mean BN": entry.value("accuracy-mean-bn", has_spread=False)},
    "unseen": Entry.unseen,
    "chosen": lambda entry: {"chosen": entry.chosen()},
    "runs": lambda entry: {"runs": count(max((value.number for value in entry.values.values()), default=None))},
    "lr": lambda entry: {"lr": Cell() if entry.chosen().text else entry.rate()},
    "learning rate": lambda entry: {"learning rate": entry.rate()},
    "rounds": lambda entry: {"rounds": entry.mean("rounds")},
    "exchanges": lambda entry: {"exchanges": entry.mean("exchanges")},
    "MB sent": lambda entry: {"MB sent": entry.mean("payload-bytes", MEGABYTE, 1)},
    "MB a round": lambda entry: {"MB a round, as papers count": entry.mean("paper-bytes", MEGABYTE, 2, of="rounds")},
    "seconds": lambda entry: {"seconds": entry.mean("seconds", 1, 1)},
    "s": lambda entry: {"s": entry.mean("seconds", 1, 1)},
    "seed": lambda entry: {"seed": count(entry.rows[0]["seed"])},
    "state": lambda entry: {"state": _state(entry.rows[0])},
    "rounds done": lambda entry: {"rounds done": count(len(rounds_of(entry.rows[0])))},
    "of": lambda entry: {"of": count(options_of_run(entry.rows[0]).get("rounds"))},
    "score of run": _of_run,
    "folder": lambda entry: {"folder": Cell(Path(entry.rows[0]["folder"]).name)},
}
#: columns that say which line it is; a line with these alone is left out
NAMES = ("setting", "method", "seed", "quantity")
#: columns that are left out if all lines have the same
ALIKE = ("lr", "runs")
COMPARISON = ("method", "score", "personal", "mean BN", "versus", "chosen", "lr", "MB sent", "exchanges", "s")
RESULTS = ("setting", "method", "score", "difference", "printed", "others", "chosen", "runs")
REPRODUCED = ("setting", "method", "quantity", "chosen", "here", "printed")
DOMAINS = ("method", "domains")
UNSEEN = ("setting", "method", "unseen", "chosen", "s")
COSTS = ("setting", "method", "rounds", "exchanges", "MB sent", "MB a round", "seconds")
RUNS = (
    *("setting", "method", "seed", "state", "rounds done", "of", "learning rate", "chosen", "score of run"),
    *("exchanges", "MB sent", "seconds", "folder"),
)


def table(
    rows: Any,
    columns: Sequence[str] = RESULTS,
    paper: Paper | None = None,
    by: Sequence[str] = ("setting", "label"),
    digits: int = 2,
    name: str = "results",
    caption: str | None = None,
) -> Table:
    """Return a table of runs, which are rows as `rows` returns them, with columns of `COLUMNS`.

    A line is about the runs that have the keys `by` in common. With a column `quantity`, each number has its own line.
    """
    runs, paper = records(rows), paper or Paper()
    entries, lines = _entries(runs, paper, by, digits), []
    for entry in entries:
        names = entry.recorded()
        parts = [replace(entry, columns=[each, *(name for name in names if name != each)]) for each in names]
        for part in parts if "quantity" in columns else [entry]:
            line = {heading: cell for column in columns for heading, cell in COLUMNS[column](part).items()}
            if any(cell.text for heading, cell in line.items() if heading not in NAMES):
                lines.append(line)
    for heading in ALIKE:
        if len({line[heading].text for line in lines if heading in line}) == 1:
            lines = [{key: cell for key, cell in line.items() if key != heading} for line in lines]
    footer = _footer(runs, entries, columns)
    return Table(name, _caption(entries, paper) if caption is None else caption, lines, footer)


def _entries(runs: Sequence[Row], paper: Paper, by: Sequence[str], digits: int) -> list[Entry]:
    values = values_of(runs, paper.quantities, paper.rounds)
    cells = dict.fromkeys((row["setting"], row["label"]) for row in runs)
    quoted = [column for setting, label in cells for column in paper.columns(label, setting)]
    names, score = dict.fromkeys([*(column for _, _, column in values), *quoted]), score_of(runs)
    columns = sorted(names, key=lambda column: column != score) or [score]
    digits = digits if is_share(score) else ERROR_DIGITS
    entries = []
    for key in dict.fromkeys(tuple(row[name] for name in by) for row in runs):
        rows = [row for row in runs if tuple(row[name] for name in by) == key]
        setting, label = rows[0]["setting"], rows[0]["label"]
        own = {column: value for (at, method, column), value in values.items() if (at, method) == (setting, label)}
        compared = [method for at, method in cells if at == setting and (at, method, columns[0]) in values]
        baseline = compared[0] if len(compared) > 1 else ""
        entries.append(Entry(rows, setting, label, own, columns, baseline, paper, digits))
    return entries


def _caption(entries: Sequence[Entry], paper: Paper) -> str:
    column = entries[0].columns[0] if entries else "accuracy"
    numbers = {max((value.number for value in entry.values.values()), default=0) for entry in entries} - {0}
    caption = f"{heading_of(column).capitalize()}: mean"
    if max(numbers, default=1) > 1:
        caption += f" of {max(numbers)} runs" if len(numbers) == 1 else ""
        caption += " ± standard deviation; difference to the first method, paired by seed, ± half its 95 % interval"
    return caption + "; beside it the numbers that are printed" * bool(paper.reported)


def _footer(runs: Sequence[Row], entries: Sequence[Entry], columns: Sequence[str]) -> list[str]:
    """Return what a reader of these columns should know."""
    if "score" not in columns and "here" not in columns:
        return []
    lines, ended = list[str](), finished(runs)
    pairs = [own.pairs for each in entries if each.baseline and (own := each.values.get(each.columns[0]))]
    if {"difference", "versus"} & {*columns} and max(pairs, default=0) == 1:
        lines.append(WEAK)
    if any(EDGE in chosen_of(row) for row in ended):
        lines.append(ABOUT_EDGE)
    return [*lines, *(cautions(ended) if len({entry.setting for entry in entries}) == 1 else [])]


def cautions(rows: Sequence[Row]) -> list[str]:
    """Return what is to be said of the data of finished runs."""
    first = typical(rows) if rows else {}
    absent, left = first.get("absent-classes"), {node for row in rows for node in row.get("left-out", ())}
    lines = [f"Caution: {about_absent(absent, first['partition'], first['clients'])}."] if absent else []
    return lines + [f"Caution: {len(left)} nodes were missing in rounds; rounds.jsonl names them."] * bool(left)


def unseen_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the domain that nobody trained with as setting; of several domains, also a method's means."""
    named, means = list[Row](), list[Row]()
    for row in rows:
        method, _, rest = row["label"].partition(":unseen=")
        domain, colon, more = rest.partition(":")
        named.append({**row, "setting": domain or str(row.get("unseen", "")), "label": method + colon + more})
    domains = {row["setting"] for row in named}
    for key in dict.fromkeys((row["label"], row["seed"]) for row in named):
        own = [row for row in named if (row["label"], row["seed"]) == key]
        if len(own) == len(domains) > 1:
            # the mean of runs of which one failed or is missing is no number
            first = next((row for row in own if row["state"] != "finished"), own[0])
            numbers = [name for name in first if all(isinstance(row.get(name), float) for row in own)]
            means.append({**first, "setting": "mean", **{name: fmean(row[name] for row in own) for name in numbers}})
    return [*named, *means]


def curve_table(rows: Sequence[Row]) -> Table:
    """Return the score of every run over its rounds, exchanges, bytes and seconds: a line for each round with one."""
    score, lines = score_of(rows), []
    for run in rows:
        names = {"setting": Cell(run["setting"]), "method": Cell(run["label"]), "seed": count(run["seed"])}
        exchanges, sent, seconds = 0, 0, 0.0
        for row in rounds_of(run):
            exchanges += row.get("exchanges") or 0
            sent += sum(row.get(f"payload-bytes-{way}") or 0 for way in ("down", "up"))
            seconds += row.get("seconds") or 0.0
            if row.get(score) is not None:
                place = {"round": count(row["round"]), heading_of(score): count(scale_of(score) * row[score], 2)}
                counted = {"exchanges": count(exchanges), "MB sent": count(sent / MEGABYTE, 1)}
                lines.append({**names, **place, **counted, "seconds": count(seconds, 1)})
    return Table("curves", "The score over the rounds", lines)
