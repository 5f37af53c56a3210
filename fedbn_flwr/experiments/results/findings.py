"""Whether the runs have a paper's order of methods and its directions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from fedbn_flwr.experiments.results.paper import Direction, Paper, Reported
from fedbn_flwr.experiments.results.rows import Row
from fedbn_flwr.experiments.results.values import COUNTED, Key, Value

#: disagreements that are named
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


def findings(rows: Sequence[Row], values: Mapping[Key, Value], paper: Paper) -> list[Finding]:
    """Return why cells failed, and where the order of methods and the directions hold."""
    failed = {" | ".join(filter(None, (row["label"], row["setting"]))): row["error"] for row in rows if row["error"]}
    failures = [Finding(f"Failed: {cell}: {error}", False) for cell, error in failed.items()]
    return [*failures, *_orders(rows, values, paper), *_claims(rows, values, paper)]


def _orders(rows: Sequence[Row], values: Mapping[Key, Value], paper: Paper) -> Iterator[Finding]:
    """Say how many pairs of methods are ordered as in the paper, among those that it tells apart in one column."""
    cells = dict.fromkeys((row["setting"], row["label"]) for row in rows)
    for place in paper.reported:
        told, against = 0, []
        for setting in dict.fromkeys(setting for setting, _ in cells):
            methods = [label for at, label in cells if at == setting]
            columns = dict.fromkeys(column for at, _, column in values if at == setting)
            for column, (one, other) in product(columns, list(combinations(methods, 2))):
                verdict = _ordered(place, values, setting, column, one, other)
                told += verdict is not None
                against += [verdict] if verdict else []
        if told:
            text = f"Order: {told - len(against)} of {told} pairs of methods are as in {place.place}."
            more = [f"and {len(against) - NAMED} more"] if len(against) > NAMED else []
            yield Finding(text, not against, [*(f"not: {line}" for line in against[:NAMED]), *more])


def _ordered(
    place: Reported, values: Mapping[Key, Value], setting: str, column: str, one: str, other: str
) -> str | None:
    """Return an empty text if two methods are ordered as in the paper, else what is not; None if it cannot be told."""
    first, second = (place.number(method, setting, column) for method in (one, other))
    mine, its = (values.get((setting, method, column)) for method in (one, other))
    if not (first and second and mine and its):
        return None
    difference = first.mean - second.mean
    least = 0.0 if column in COUNTED else TOLD_APART
    if abs(difference) <= max(first.deviation + second.deviation, least):
        return None
    if (mine.mean - its.mean) * difference > 0:
        return ""
    sign, where = ">" if difference > 0 else "<", ", ".join(filter(None, (setting, column)))
    return f"{one} {sign} {other} in {where}: printed {first.mean} and {second.mean}, here {mine} and {its}"


def _claims(rows: Sequence[Row], values: Mapping[Key, Value], paper: Paper) -> Iterator[Finding]:
    """Say of every direction of the paper in how many settings the runs agree."""
    settings = {row["setting"]: row["labels"] for row in rows}
    for direction in paper.directions:
        pairs = list(_pairs(settings, values, direction))
        against = [pair for pair in pairs if pair[1].mean <= pair[2].mean]
        source = f" ({direction.place})" if direction.place else ""
        named = ", ".join([*direction.labels, *([] if direction.column in ACCURACIES else [direction.column])])
        text = f"Direction: {direction.text}{f' in {named}' if named else ''}{source}: "
        if not pairs:
            yield Finding(f"{text}not run", None)
        elif not against:
            yield Finding(f"{text}agrees{_where(pairs)}", True)
        else:
            where = "" if len(pairs) == 1 else f" in {len(against)} of {len(pairs)} settings"
            yield Finding(f"{text}does not agree{where}{_where(against)}", False)


def _where(pairs: Sequence[tuple[str, Value, Value]]) -> str:
    name, high, low = pairs[0]
    return f": {high} and {low}" + (f" in {name}" if name else "") + (", ..." if len(pairs) > 1 else "")


def _pairs(
    settings: Mapping[str, Mapping[str, str]], values: Mapping[Key, Value], direction: Direction
) -> Iterator[tuple[str, Value, Value]]:
    """Return the two numbers wherever the sides' settings differ only in the labels that the sides name."""
    high, low = direction.high, direction.low
    named = {*high.labels, *low.labels}
    for (first, labels), (second, others) in product(settings.items(), repeat=2):
        fits = {*high.labels, *direction.labels} <= {*labels.values()}
        fits = fits and {*low.labels, *direction.labels} <= {*others.values()}
        if not fits or any(label != others[axis] for axis, label in labels.items() if label not in named):
            continue
        column = direction.column or next((key[2] for key in values if key[:2] == (first, high.method)), "")
        here, there = values.get((first, high.method, column)), values.get((second, low.method, column))
        if here and there:
            yield first, here, there
