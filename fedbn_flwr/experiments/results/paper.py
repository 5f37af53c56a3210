"""What a paper says about a study: its numbers, its directions, and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A number of a paper."""

    printed: str
    mean: float
    deviation: float


@dataclass(frozen=True)
class Reported:
    """Numbers from one place: method -> setting -> column -> number."""

    place: str
    values: Mapping[str, Mapping[str, Mapping[str, Number]]]

    def number(self, method: str, setting: str, column: str) -> Number | None:
        """Return a cell's number; the column without a name is that of a table with one quantity."""
        numbers = self.values.get(method, {}).get(setting, {})
        return numbers.get(column) or numbers.get("")


@dataclass(frozen=True)
class Side:
    """One side of a direction: a method, and the labels of its settings."""

    method: str
    labels: Sequence[str]


@dataclass(frozen=True)
class Direction:
    """A statement of a paper that one side is above the other one."""

    text: str
    place: str
    high: Side
    low: Side
    #: labels that both sides' settings have
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

    def numbers(self, method: str, setting: str, column: str) -> dict[str, Number | None]:
        """Return a cell's number of each place that is quoted."""
        return {each.place: each.number(method, setting, column) for each in self.reported}

    def columns(self, method: str, setting: str) -> list[str]:
        """Return the columns in which a cell has a number."""
        return [name for each in self.reported for name in each.values.get(method, {}).get(setting, {}) if name]
