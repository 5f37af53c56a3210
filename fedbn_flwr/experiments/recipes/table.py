"""The table of a recipe: the runs' numbers beside the paper's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from fedbn_flwr.experiments.choice import ABOUT_EDGE, chosen_of
from fedbn_flwr.experiments.output.console import new_table
from fedbn_flwr.experiments.output.recorder import outcome_of
from fedbn_flwr.experiments.recipes.matrix import Results
from fedbn_flwr.experiments.recipes.quantities import columns_of

#: setting, method, column
Key = tuple[str, str, str]
WIDTH = 120


@dataclass(frozen=True)
class Value:
    """A number of the runs: mean and standard deviation over seeds."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        """Return the number with so many digits after the point."""
        return f"{self.mean:z.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.seeds > 1 else "")


def values_of(results: Results, rounds: int) -> dict[Key, Value]:
    """Return the runs' numbers; `rounds` are those of the recipe at full size."""
    values: dict[Key, list[float]] = {}
    for setting, method in results.recipe.cells():
        for summary in results.finished(setting.name, method):
            for quantity in results.recipe.quantities:
                for column, value in columns_of(summary, quantity, rounds).items():
                    values.setdefault((setting.name, method, column), []).append(value)
    return {key: Value(fmean(runs), stdev(runs) if len(runs) > 1 else 0.0, len(runs)) for key, runs in values.items()}


@dataclass(frozen=True)
class Row:
    """One line of the table: a column of a cell."""

    setting: str
    method: str
    column: str
    #: None if no run of the cell has the number
    here: Value | None
    #: how a run of the cell failed; empty if none did
    failure: str
    #: the numbers of each place that the recipe quotes, as printed; empty where a place has none
    printed: Sequence[str]

    @property
    def text(self) -> str:
        """The number of the runs, with as many digits as are printed, or why there is none."""
        digits = max([2, *(len(text.partition(" ")[0].partition(".")[2]) for text in self.printed)])
        return self.failure or (self.here.text(digits) if self.here else "")


def rows_of(results: Results, values: dict[Key, Value]) -> Iterator[Row]:
    """Return the lines of the table; a cell without any number has one line with an empty column."""
    recipe, failures = results.recipe, results.failures()
    for setting, method in recipe.cells():
        columns = [column for at, label, column in values if (at, label) == (setting.name, method)]
        quoted = [c for place in recipe.reported for c in place.values.get(method, {}).get(setting.name, {}) if c]
        for column in dict.fromkeys([*columns, *quoted]) or [""]:
            numbers = [place.number(method, setting.name, column) for place in recipe.reported]
            printed = [number.printed if number else "" for number in numbers]
            here = values.get((setting.name, method, column))
            failed = failures.get((setting.name, method))
            yield Row(setting.name, method, column, here, outcome_of(failed) if failed else "", printed)


def write_table(results: Results, values: dict[Key, Value], lines: Sequence[str]) -> str:
    """Return the table, the lines about it, and the recipe's notes, as plain text."""
    recipe, text = results.recipe, StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, highlight=False)
    console.print(f"{recipe.name}: {recipe.about}" + (f" ({recipe.place})" if recipe.place else ""), soft_wrap=True)
    console.print(_table(results, values))
    edge = [ABOUT_EDGE] if any(run.get("chosen-at-edge") for runs in results.runs.values() for run in runs) else []
    for line in (*lines, *edge, *(f"Note: {note}" for note in recipe.notes)):
        console.print(line, soft_wrap=True, markup=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _table(results: Results, values: dict[Key, Value]) -> Table:
    places = [place.place for place in results.recipe.reported]
    chosen = {key: next((chosen_of(run) for run in results.finished(*key)), "") for key in results.runs}
    names = ["chosen"] if any(chosen.values()) else []
    table = new_table("", "setting", "method", "", *names, numbers=["here", *places])
    rows, before = list(rows_of(results, values)), ""
    for row in rows:
        several = (
            len({other.column for other in rows if (other.setting, other.method) == (row.setting, row.method)}) > 1
        )
        name = row.setting if row.setting != before else ""
        values_chosen = [chosen.get((row.setting, row.method), "")] if names else []
        table.add_row(name, row.method, row.column if several else "", *values_chosen, row.text, *row.printed)
        before = row.setting
    return table
