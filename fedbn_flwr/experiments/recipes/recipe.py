"""A recipe: methods and settings of one table or figure, with the numbers that a paper reports.

A recipe is a YAML file, which `schema.py` reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedbn_flwr.experiments.choice import Grid
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.plugins.options import UsageError

#: column -> value; the rounds are those of the recipe at full size
Read = Callable[[Mapping[str, Any], int], dict[str, float]]
AVERAGE = "Average"


def columns_of(summary: Mapping[str, Any], quantity: str, rounds: int) -> dict[str, float]:
    """Return the columns that a run fills in; none if it could not train or did not record the quantity."""
    try:
        return QUANTITIES[quantity](summary, rounds)
    except (KeyError, TypeError):  # a number that is not finite is null
        return {}


def _scaled(key: str, factor: float) -> Read:
    return lambda summary, _: {key: factor * summary[key]}


def _domains(summary: Mapping[str, Any], _: int) -> dict[str, float]:
    values = {name: 100 * value for name, value in summary["domain-accuracy"].items()}
    return {**values, AVERAGE: fmean(values.values())}


#: columns that are counted and not measured, with their units: every printed digit says something
COUNTED = {"megabytes": "MiB a round", "gigabytes": "GiB in total", "extra-exchanges": "share of extra exchanges, %"}

#: accuracies and shares in percent
QUANTITIES: dict[str, Read] = {
    **{key: _scaled(key, 100) for key in ("accuracy", "mean-iou", "accuracy-personal", "accuracy-mean-bn")},
    # of every domain, and the mean over domains
    "domain-accuracy": _domains,
    **{key: _scaled(key, 1.0) for key in ("loss", "train-loss", "train-loss-global")},
    # as FedTAN's paper counts, in powers of 2^10: a round, and in as many rounds as the recipe has at full size
    "megabytes": lambda summary, _: {"megabytes": summary["paper-bytes"] / summary["rounds"] / 2**20},
    "gigabytes": lambda summary, rounds: {"gigabytes": summary["paper-bytes"] / summary["rounds"] * rounds / 2**30},
    # the share of the exchanges beyond one a round
    "extra-exchanges": lambda summary, _: {"extra-exchanges": 100 * (1 - summary["rounds"] / summary["exchanges"])},
}


def heading_of(column: str) -> str:
    """Return a column's name with its unit."""
    return COUNTED.get(column) or column.replace("-", " ").replace("bn", "BN") + ("" if "loss" in column else ", %")


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
class Setting:
    """One column of a matrix: a label on every axis, and the options that the labels stand for."""

    #: axis -> label
    labels: Mapping[str, str]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The labels, as in the table; empty in a matrix without axes."""
        return ", ".join(self.labels.values())

    def has(self, labels: Sequence[str]) -> bool:
        """Whether all of these are labels of this setting."""
        return set(labels) <= set(self.labels.values())


@dataclass(frozen=True)
class Recipe:
    """A matrix of methods x settings x seeds, and what a paper says about it."""

    name: str
    #: the place in the paper, as printed
    place: str
    about: str
    #: label -> `STRATEGY[+NORM][:key=value]...`
    methods: Mapping[str, str]
    settings: Sequence[Setting]
    #: (methods, labels) that the matrix does not have
    left_out: Sequence[tuple[Sequence[str], Sequence[str]]]
    seeds: int
    grid: Grid
    quantities: Sequence[str]
    reported: Sequence[Reported]
    directions: Sequence[Direction]
    notes: Sequence[str]
    #: the same cells in small; None if there is no such form
    small: "Recipe | None" = None

    def methods_of(self, setting: Setting) -> list[str]:
        """Return the labels of the methods that run in a setting."""
        absent = {method for methods, labels in self.left_out if setting.has(labels) for method in methods}
        return [method for method in self.methods if method not in absent]

    def cells(self) -> list[tuple[Setting, str]]:
        """Return every setting with every method that runs in it, by label."""
        return [(setting, method) for setting in self.settings for method in self.methods_of(setting)]

    def experiment(self, setting: Setting, method: str, seed: int = 0) -> Experiment:
        """Resolve one run; a UsageError names the cell."""
        try:
            return resolve({**setting.options, "method": self.methods[method], "seed": seed})
        except UsageError as error:
            cell = f"{method!r} in {setting.name!r}" if setting.name else repr(method)
            raise UsageError(f"recipe {self.name}: {cell}: {error}") from None

    def in_small(self) -> "Recipe":
        """Return the same cells as the recipe's `smoke` has them."""
        if self.small is None:
            raise UsageError(f"recipe {self.name} has no smoke section, so --smoke does not work")
        return self.small

    def only(self, labels: Sequence[str]) -> "Recipe":
        """Return the part with these methods and labels of axes; an axis of which none is named stays whole."""
        axes = {axis: dict.fromkeys(s.labels[axis] for s in self.settings) for axis in self.settings[0].labels}
        known = [*self.methods, *(label for values in axes.values() for label in values)]
        if unknown := [label for label in labels if label not in known]:
            raise UsageError(f"recipe {self.name} has no {unknown[0]!r}; it has: {', '.join(known)}")
        methods = {label: text for label, text in self.methods.items() if label in labels}
        wanted = {axis: [label for label in values if label in labels] or list(values) for axis, values in axes.items()}
        settings = [s for s in self.settings if all(s.labels[axis] in wanted[axis] for axis in wanted)]
        return replace(self, methods=methods or self.methods, settings=settings)
