"""A recipe: methods and settings of one table or figure, and the paper that reports them.

A recipe is a YAML file, which `schema.py` reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedbn_flwr.experiments.choice import Grid
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.plugins.options import UsageError


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
    paper: Paper
    #: label -> `STRATEGY[+NORM][:key=value]...`
    methods: Mapping[str, str]
    settings: Sequence[Setting]
    #: (methods, labels) that the matrix does not have
    left_out: Sequence[tuple[Sequence[str], Sequence[str]]]
    seeds: int
    grid: Grid
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
