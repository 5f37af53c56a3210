"""The table of a recipe: the runs' numbers beside the paper's, and where the order of methods agrees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import combinations, product
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedbn_flwr.experiments.recipes.matrix import Results
from fedbn_flwr.experiments.recipes.quantities import COUNTED, columns_of
from fedbn_flwr.experiments.recipes.recipe import Setting
from fedbn_flwr.experiments.recipes.reported import Direction, Number, Reported, Side

#: setting, method, column
Key = tuple[str, str, str]
#: disagreements that the table names; `results.json` has the numbers of all
NAMED = 12
WIDTH = 120
#: difference up to which two printed numbers say nothing of the order, in percent
TOLD_APART = 1.0


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
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.seeds > 1 else "")


def values_of(results: Results, rounds: int) -> dict[Key, Value]:
    """Return the runs' numbers; `rounds` are those of the recipe at full size."""
    values: dict[Key, list[float]] = {}
    for setting, method in results.recipe.cells():
        for summary in results.finished(setting.name, method):
            for quantity in results.recipe.quantities:
                for column, value in columns_of(summary, quantity, rounds).items():
                    values.setdefault((setting.name, method, column), []).append(value)
    return {key: Value(fmean(runs), stdev(runs) if len(runs) > 1 else 0.0, len(runs)) for key, runs in values.items()}


def write_table(results: Results, values: dict[Key, Value]) -> str:
    """Return the table, the statements about directions, and why cells failed, as plain text."""
    recipe, text = results.recipe, StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, highlight=False)
    console.print(f"{recipe.name}: {recipe.about}" + (f" ({recipe.place})" if recipe.place else ""), soft_wrap=True)
    console.print(_table(results, values))
    lines = [*_failures(results), *_orders(results, values), *_claims(results, values)]
    lines += [f"Note: {note}" for note in recipe.notes]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _table(results: Results, values: dict[Key, Value]) -> Table:
    recipe, errors = results.recipe, results.errors()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    for heading in ("setting", "method", "", "here"):
        table.add_column(heading, justify="right" if heading == "here" else "left", overflow="fold")
    for place in recipe.reported:
        table.add_column(place.place, justify="right", overflow="fold")
    before = ""
    for setting, method in recipe.cells():
        columns = [column for at, label, column in values if (at, label) == (setting.name, method)]
        quoted = [c for place in recipe.reported for c in place.values.get(method, {}).get(setting.name, {}) if c]
        several = len({*columns, *quoted}) > 1
        for column in dict.fromkeys([*columns, *quoted]) or [""]:
            failed = "failed" if (setting.name, method) in errors else ""
            here = values.get((setting.name, method, column))
            printed = [_printed(place.number(method, setting.name, column)) for place in recipe.reported]
            name = setting.name if setting.name != before else ""
            digits = max([2, *(len(text.partition(" ")[0].partition(".")[2]) for text in printed)])
            number = failed or (here.text(digits) if here else "")
            table.add_row(name, method, column if several else "", number, *printed)
            before = setting.name
    return table


def _printed(number: Number | None) -> str:
    return number.printed if number else ""


def _failures(results: Results) -> Iterator[str]:
    for (setting, method), error in results.errors().items():
        yield f"Failed: {method}{f' | {setting}' if setting else ''}: {error}"


def _orders(results: Results, values: dict[Key, Value]) -> Iterator[str]:
    """Say how many pairs of methods are ordered as in the paper, among those that it tells apart in one column."""
    for place in results.recipe.reported:
        told, against = 0, []
        for setting in results.recipe.settings:
            methods = results.recipe.methods_of(setting)
            columns = dict.fromkeys(column for at, _, column in values if at == setting.name)
            for column, (one, other) in product(columns, list(combinations(methods, 2))):
                verdict = _ordered(place, values, setting, column, one, other)
                told += verdict is not None
                against += [verdict] if verdict else []
        if told:
            yield f"Order: {told - len(against)} of {told} pairs of methods are as in {place.place}."
        for line in against[:NAMED]:
            yield f"  not: {line}"
        if len(against) > NAMED:
            yield f"  and {len(against) - NAMED} more"


def _ordered(
    place: Reported, values: dict[Key, Value], setting: Setting, column: str, one: str, other: str
) -> str | None:
    """Return an empty text if two methods are ordered as in the paper, else what is not; None if it cannot be told."""
    printed = [place.number(method, setting.name, column) for method in (one, other)]
    here = [values.get((setting.name, method, column)) for method in (one, other)]
    (first, second), (mine, its) = printed, here
    if not (first and second and mine and its):
        return None
    difference = first.mean - second.mean
    least = 0.0 if column in COUNTED else TOLD_APART
    if abs(difference) <= max(first.deviation + second.deviation, least):
        return None
    if (mine.mean - its.mean) * difference > 0:
        return ""
    sign, where = ">" if difference > 0 else "<", ", ".join(filter(None, (setting.name, column)))
    return f"{one} {sign} {other} in {where}: printed {first.mean} and {second.mean}, here {mine} and {its}"


def _claims(results: Results, values: dict[Key, Value]) -> Iterator[str]:
    """Say of every direction of the paper in how many settings the runs agree."""
    for direction in results.recipe.directions:
        pairs = list(_pairs(results, values, direction))
        agreeing = sum(high.mean > low.mean for _, high, low in pairs)
        source = f" ({direction.place})" if direction.place else ""
        text = direction.text + (f" in {', '.join(direction.labels)}" if direction.labels else "")
        if not pairs:
            yield f"Direction: {text}{source}: not run"
        elif agreeing == len(pairs):
            yield f"Direction: {text}{source}: agrees{_where(pairs)}"
        else:
            where = "" if len(pairs) == 1 else f" in {len(pairs) - agreeing} of {len(pairs)} settings"
            against = [pair for pair in pairs if pair[1].mean <= pair[2].mean]
            yield f"Direction: {text}{source}: does not agree{where}{_where(against)}"


def _where(pairs: Sequence[tuple[str, Value, Value]]) -> str:
    name, high, low = pairs[0]
    return f": {high} and {low}" + (f" in {name}" if name else "") + (", ..." if len(pairs) > 1 else "")


def _pairs(results: Results, values: dict[Key, Value], direction: Direction) -> Iterator[tuple[str, Value, Value]]:
    """Return the two numbers wherever the sides' settings differ only in the labels that the sides name."""
    for first, second in product(results.recipe.settings, repeat=2):
        if not (_fits(first, direction, direction.high) and _fits(second, direction, direction.low)):
            continue
        named = {*direction.high.labels, *direction.low.labels}
        if any(first.labels[axis] != second.labels[axis] for axis in first.labels if not _named(first, axis, named)):
            continue
        column = direction.column or next(
            (key[2] for key in values if key[:2] == (first.name, direction.high.method)), ""
        )
        high = values.get((first.name, direction.high.method, column))
        low = values.get((second.name, direction.low.method, column))
        if high and low:
            yield first.name, high, low


def _fits(setting: Setting, direction: Direction, side: Side) -> bool:
    return setting.has(side.labels) and setting.has(direction.labels)


def _named(setting: Setting, axis: str, named: set[str]) -> bool:
    return setting.labels[axis] in named
