"""What a paper says about a study: its numbers, its directions, and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

#: columns that are counted and not measured, with their units: every printed digit says something
COUNTED = {
    "megabytes": "MiB a round",
    "gigabytes": "GiB in total",
    "extra-exchanges": "share of extra exchanges, %",
}
#: of the score by which methods are compared: of the mean of what stays on nodes, and, on a domain
#: that nobody trained with, after adapting to so many of its unlabeled samples
OF_ONE_MODEL = ("mean-bn", "adapted-20", "adapted-100", "adapted-all")
#: the same, and of the nodes' own models
FORMS = ("personal", *OF_ONE_MODEL)
#: what a table can have of each run; `score` is that by which methods are compared
QUANTITIES = (
    "score",
    "accuracy",
    "mean-iou",
    *(f"accuracy-{form}" for form in FORMS),
    *(f"mean-iou-{form}" for form in FORMS),
    "domain-accuracy",
    "loss",
    "train-loss",
    "train-loss-global",
    *COUNTED,
)


class Number(NamedTuple):
    """A number of a paper."""

    printed: str
    mean: float
    deviation: float

    @property
    def digits(self) -> int:
        """How many digits of the mean stand behind its point."""
        return len(self.printed.partition(" ")[0].partition(".")[2])


#: in the place of a number that a paper does not print
UNPRINTED = Number("", nan, nan)


@dataclass(frozen=True)
class Reported:
    """Numbers from one place, by method, setting and column.

    A table with one quantity has the column ''.
    """

    place: str
    values: Mapping[tuple[str, str, str], Number]

    def number(self, method: str, setting: str, column: str) -> Number | None:
        """Return a cell's number; None if the place has none."""
        return self.values.get((method, setting, column)) or self.values.get((method, setting, ""))


class Side(NamedTuple):
    """One side of a direction: a method, and the labels of its settings."""

    method: str
    labels: Sequence[str]


class Direction(NamedTuple):
    """A statement of a paper that one side is above the other one, in settings with these
    labels.
    """

    text: str
    place: str
    high: Side
    low: Side
    labels: Sequence[str]
    column: str


@dataclass(frozen=True)
class Paper:
    """What stands beside the runs of a study; empty if the study is nobody else's."""

    #: the place of the table or figure, as printed
    place: str = ""
    about: str = ""
    #: what the table shows; if it is empty, all that the runs have measured
    quantities: Sequence[str] = ()
    reported: Sequence[Reported] = ()
    directions: Sequence[Direction] = ()
    notes: Sequence[str] = ()
    #: the rounds of the study at full size
    rounds: int = 1

    def digits(self, method: str, setting: str, column: str) -> int:
        """Return how many digits the numbers of a cell have behind their points."""
        numbers = (each.number(method, setting, column) for each in self.reported)
        return max((number.digits for number in numbers if number), default=0)

    def columns(self, method: str, setting: str) -> list[str]:
        """Return the columns in which a cell has a number."""
        return [
            column
            for each in self.reported
            for *at, column in each.values
            if at == [method, setting] and column
        ]
