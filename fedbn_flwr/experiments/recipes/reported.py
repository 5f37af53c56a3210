"""The numbers and directions that a paper reports, as a recipe quotes them."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.experiments.recipes.schema import Fields

#: a number as printed, with or without a deviation
PRINTED = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(?:±\s*(\d+(?:\.\d+)?))?\s*")


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


def read_reported(given: Fields, methods: Collection[str], settings: Sequence[str]) -> list[Reported]:
    """Read `reported`: a list of places with values by method, setting and column."""
    return [_reported(part, methods, settings) for part in given.parts("reported", ("place", "values"))]


def read_directions(given: Fields, methods: Collection[str], labels: Collection[str]) -> list[Direction]:
    """Read `directions`: `METHOD [@ LABEL] > METHOD [@ LABEL]`, everywhere or in the settings with some labels."""
    return [_direction(part, methods, labels) for part in given.parts("directions", ("claim", "in", "place", "column"))]


def _reported(part: Fields, methods: Collection[str], settings: Sequence[str]) -> Reported:
    place, values = part.text("place"), part.get("values")
    if not place:
        part.refuse("place is missing: the page and the table or figure that the numbers come from")
    if not isinstance(values, Mapping):
        part.refuse("values must be a mapping of methods")
    read: dict[str, Mapping[str, Mapping[str, Number]]] = {}
    for method, of_method in values.items():
        if method not in methods:
            part.refuse(f"values: unknown method {method!r}; the recipe has: {', '.join(methods)}")
        by_setting = {"": of_method} if settings == [""] else of_method
        if not isinstance(by_setting, Mapping):
            part.refuse(f"values: {method} must be a mapping of settings: {'; '.join(settings)}")
        for setting in by_setting:
            if setting not in settings:
                part.refuse(f"values: {method}: unknown setting {setting!r}; the recipe has: {'; '.join(settings)}")
        read[method] = {
            setting: _columns(part, ": ".join(filter(None, ("values", method, setting))), cell)
            for setting, cell in by_setting.items()
        }
    return Reported(place, read)


def _columns(part: Fields, where: str, cell: Any) -> dict[str, Number]:
    cells = cell if isinstance(cell, Mapping) else {"": cell}
    return {str(column): _number(part, where, value) for column, value in cells.items()}


def _number(part: Fields, where: str, value: Any) -> Number:
    match = None if isinstance(value, bool) else PRINTED.fullmatch(str(value))
    if not match:
        part.refuse(f"{where} must be a number, or a text like '45.90 ± 6.39', got {value!r}")
    return Number(str(value).strip(), float(match[1]), float(match[2] or 0))


def _direction(part: Fields, methods: Collection[str], labels: Collection[str]) -> Direction:
    text = part.text("claim")
    sides = [_side(part, side, methods, labels) for side in text.split(" > ")]
    if len(sides) != 2:
        part.refuse(f"claim must be METHOD > METHOD, or METHOD @ LABEL > METHOD @ LABEL, got {text!r}")
    return Direction(text, part.text("place"), sides[0], sides[1], part.names("in", labels, ()), part.text("column"))


def _side(part: Fields, text: str, methods: Collection[str], labels: Collection[str]) -> Side:
    method, *places = (piece.strip() for piece in text.split(" @ "))
    if method not in methods:
        part.refuse(f"claim: unknown method {method!r}; the recipe has: {', '.join(methods)}")
    if unknown := [label for label in places if label not in labels]:
        part.refuse(f"claim: unknown label {unknown[0]!r}; the recipe has: {', '.join(labels) or 'none'}")
    return Side(method, places)
