"""Where the runs of a recipe agree with the paper: the order of methods, and the directions that its text states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from fedbn_flwr.experiments.recipes.matrix import Results
from fedbn_flwr.experiments.recipes.quantities import COUNTED
from fedbn_flwr.experiments.recipes.recipe import Direction, Reported, Setting, Side
from fedbn_flwr.experiments.recipes.table import Key, Value

#: disagreements that are named; `results.json` has the numbers of all
NAMED = 12
#: difference up to which two printed numbers say nothing of the order, in percent
TOLD_APART = 1.0
#: columns that a statement is about unless it names another one
ACCURACIES = ("", "accuracy", "Average")


@dataclass(frozen=True)
class Finding:
    """One sentence about the results."""

    text: str
    #: whether the paper's statement holds; None if it was not run
    holds: bool | None
    #: the disagreements, by name
    details: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Return the sentence and its details, one a line."""
        return [self.text, *(f"  {detail}" for detail in self.details)]


def findings(results: Results, values: dict[Key, Value]) -> list[Finding]:
    """Return why cells failed, and where the order of methods and the directions hold."""
    failures = [
        Finding(f"Failed: {method}{f' | {setting}' if setting else ''}: {run['error']}", False)
        for (setting, method), run in results.failures().items()
    ]
    return [*failures, *_orders(results, values), *_claims(results, values)]


def _orders(results: Results, values: dict[Key, Value]) -> Iterator[Finding]:
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
            text = f"Order: {told - len(against)} of {told} pairs of methods are as in {place.place}."
            more = [f"and {len(against) - NAMED} more"] if len(against) > NAMED else []
            yield Finding(text, not against, [*(f"not: {line}" for line in against[:NAMED]), *more])


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


def _claims(results: Results, values: dict[Key, Value]) -> Iterator[Finding]:
    """Say of every direction of the paper in how many settings the runs agree."""
    for direction in results.recipe.directions:
        pairs = list(_pairs(results, values, direction))
        agreeing = sum(high.mean > low.mean for _, high, low in pairs)
        source = f" ({direction.place})" if direction.place else ""
        column = [] if direction.column in ACCURACIES else [direction.column]
        named = ", ".join([*direction.labels, *column])
        text = direction.text + (f" in {named}" if named else "")
        if not pairs:
            yield Finding(f"Direction: {text}{source}: not run", None)
        elif agreeing == len(pairs):
            yield Finding(f"Direction: {text}{source}: agrees{_where(pairs)}", True)
        else:
            where = "" if len(pairs) == 1 else f" in {len(pairs) - agreeing} of {len(pairs)} settings"
            against = [pair for pair in pairs if pair[1].mean <= pair[2].mean]
            yield Finding(f"Direction: {text}{source}: does not agree{where}{_where(against)}", False)


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
