"""Whether the runs have a paper's order of methods and its directions."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from fedbn_flwr.experiments.recipes.paper import COUNTED, Direction, Paper, Reported
from fedbn_flwr.experiments.results.rows import CELL, Frame
from fedbn_flwr.experiments.results.values import number_text, numbers_of, values_of

#: disagreements that are named
NAMED = 12
#: difference up to which two printed numbers say nothing of the order, in percent
TOLD_APART = 1.0
#: columns that a statement is about unless it names another one
ACCURACIES = ("", "accuracy", "Average")


class Statement(NamedTuple):
    """One sentence about the results."""

    text: str
    #: whether the paper's statement holds; None if it was not run
    holds: bool | None
    #: the disagreements, by name
    details: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Return the sentence and its details, one a line."""
        return [self.text, *(f"  {detail}" for detail in self.details)]


#: by setting, column and label, the line of `values_of`
CellValues = Mapping[tuple[str, str, str], Any]


def statements(runs: Frame, paper: Paper) -> list[Statement]:
    """Return why cells failed, and where the order of methods and the directions hold."""
    values = values_of(numbers_of(runs, paper.quantities, paper.rounds)).itertuples()
    means = {each.Index: each for each in values}
    failed = runs[runs["error"] != ""].drop_duplicates(CELL, keep="last")
    cells = {
        " | ".join(filter(None, (run.label, run.setting))): run.error for run in failed.itertuples()
    }
    failures = [Statement(f"Failed: {cell}: {error}", False) for cell, error in cells.items()]
    orders = (_order(place, runs, means) for place in paper.reported)
    settings = dict(zip(runs["setting"], runs["labels"], strict=True))
    return [
        *failures,
        *filter(None, orders),
        *(_claim(each, settings, means) for each in paper.directions),
    ]


def _order(place: Reported, runs: Frame, means: CellValues) -> Statement | None:
    """Say how many pairs of methods are ordered as in the paper, among those that it tells apart in
    one column.
    """
    verdicts = list[str | None]()
    for setting, own in runs.groupby("setting", sort=False):
        columns = dict.fromkeys(column for at, column, _ in means if at == setting)
        pairs = [*combinations(own["label"].unique(), 2)]
        verdicts += [
            _ordered(place, means, setting, column, *pair)
            for column, pair in product(columns, pairs)
        ]
    told = len(verdicts) - verdicts.count(None)
    against = [*filter(None, verdicts)]
    more = []
    if len(against) > NAMED:
        more = [f"and {len(against) - NAMED} more"]
    details = [*(f"not: {line}" for line in against[:NAMED]), *more]
    text = f"Order: {told - len(against)} of {told} pairs of methods are as in {place.place}."
    if told:
        return Statement(text, not against, details)
    return None


def _ordered(
    place: Reported, means: CellValues, setting: str, column: str, one: str, other: str
) -> str | None:
    """Return an empty text if two methods are ordered as in the paper, else what is not; None if it
    cannot be told.
    """
    first, second = (place.number(method, setting, column) for method in (one, other))
    mine, its = (means.get((setting, column, method)) for method in (one, other))
    if not (first and second and mine and its):
        return None
    difference = first.mean - second.mean
    least = 0.0 if column in COUNTED else TOLD_APART
    if abs(difference) <= max(first.deviation + second.deviation, least):
        return None
    if (mine.mean - its.mean) * difference > 0:
        return ""
    sign = ">" if difference > 0 else "<"
    where = ", ".join(filter(None, (setting, column)))
    return (
        f"{one} {sign} {other} in {where}: printed {first.mean} and {second.mean}, here "
        f"{_text(mine)} and {_text(its)}"
    )


def _text(value: Any) -> str:
    return number_text(value.mean, value.deviation if value.number > 1 else None)


def _claim(
    direction: Direction, settings: Mapping[str, Mapping[str, str]], means: CellValues
) -> Statement:
    """Say of a direction of the paper in how many settings the runs agree."""
    pairs = list(_pairs(direction, settings, means))
    against = [pair for pair in pairs if pair[1].mean <= pair[2].mean]
    source = ""
    if direction.place:
        source = f" ({direction.place})"
    named = [*direction.labels]
    if direction.column not in ACCURACIES:
        named.append(direction.column)
    place = ""
    if named:
        place = f" in {', '.join(named)}"
    text = f"Direction: {direction.text}{place}{source}: "
    if not pairs:
        return Statement(f"{text}not run", None)
    if not against:
        return Statement(f"{text}agrees{_where(pairs)}", True)
    if len(pairs) == 1:
        where = ""
    else:
        where = f" in {len(against)} of {len(pairs)} settings"
    return Statement(f"{text}does not agree{where}{_where(against)}", False)


def _where(pairs: Sequence[tuple[str, Any, Any]]) -> str:
    name, high, low = pairs[0]
    text = f": {_text(high)} and {_text(low)}"
    if name:
        text += f" in {name}"
    if len(pairs) > 1:
        text += ", ..."
    return text


def _pairs(
    direction: Direction, settings: Mapping[str, Mapping[str, str]], means: CellValues
) -> Iterator[tuple[str, Any, Any]]:
    """Return the two numbers wherever the sides' settings differ only in the labels that the sides
    name.
    """
    high = direction.high
    low = direction.low
    named = {*high.labels, *low.labels}
    for (first, labels), (second, others) in product(settings.items(), repeat=2):
        fits = {*high.labels, *direction.labels} <= {*labels.values()}
        fits = fits and {*low.labels, *direction.labels} <= {*others.values()}
        if not fits or any(
            label != others[axis] for axis, label in labels.items() if label not in named
        ):
            continue
        column = direction.column or next(
            (name for at, name, own in means if (at, own) == (first, high.method)), ""
        )
        here = means.get((first, column, high.method))
        there = means.get((second, column, low.method))
        if here and there:
            yield first, here, there
