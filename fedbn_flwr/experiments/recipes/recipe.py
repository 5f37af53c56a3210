"""A recipe: a study in a file, and the paper that reports it. `schema.py` reads the file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.study import Study
from fedbn_flwr.plugins.options import UsageError


@dataclass(frozen=True)
class Recipe:
    """A study in a file, and what a paper says about it."""

    name: str
    #: the file's content
    content: Mapping[str, Any]
    study: Study
    paper: Paper
    #: the same cells in small; None if there is no such form
    small: "Recipe | None" = None

    def in_small(self) -> "Recipe":
        """Return the same cells as the recipe's `smoke` has them."""
        if self.small is None:
            raise UsageError(f"recipe {self.name} has no smoke section, so --smoke does not work")
        return self.small

    def only(self, labels: Sequence[str]) -> "Recipe":
        """Return the part with these methods and labels of axes; an axis of which none is named stays whole."""
        study = self.study
        axes = {axis: dict.fromkeys(s.labels[axis] for s in study.settings) for axis in study.settings[0].labels}
        known = [*study.methods, *(label for values in axes.values() for label in values)]
        if unknown := [label for label in labels if label not in known]:
            raise UsageError(f"recipe {self.name} has no {unknown[0]!r}; it has: {', '.join(known)}")
        methods = {label: text for label, text in study.methods.items() if label in labels}
        wanted = {axis: [label for label in values if label in labels] or list(values) for axis, values in axes.items()}
        settings = [s for s in study.settings if all(s.labels[axis] in wanted[axis] for axis in wanted)]
        return replace(self, study=replace(study, methods=methods or study.methods, settings=settings))
