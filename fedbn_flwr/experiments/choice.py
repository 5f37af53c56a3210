"""Values of options that are chosen for each method on held-out training data: `--grid
lr=0.03,0.1`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

#: option -> the values to choose from
Grid = Mapping[str, Sequence[Any]]
#: runs of every combination of values, each with a seed of its own, whose mean score counts
SEEDS = 2
#: stands behind a chosen value that is the least or the largest of its grid
EDGE = "*"
ABOUT_EDGE = "* the least or the largest value of its grid: a better one may lie beyond."


@dataclass(frozen=True)
class Choice:
    """What is chosen from for a method, and what was chosen."""

    grid: Grid
    seeds: int = SEEDS
    #: empty before the search
    values: Mapping[str, Any] = field(default_factory=dict)
    #: combination of values -> mean score; None if a run with it failed
    scores: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The grid, by which a folder's run is known again."""
        values = "; ".join(
            f"{key}={','.join(map(str, values))}" for key, values in self.grid.items()
        )
        return f"{values} by {self.seeds} seeds"

    def combinations(self) -> dict[str, dict[str, Any]]:
        """Return every combination of values by its text."""
        named = {}
        for combination in product(*self.grid.values()):
            values = dict(zip(self.grid, combination, strict=True))
            named[",".join(f"{key}={value}" for key, value in values.items())] = values
        return named

    def summary(self) -> dict[str, Any]:
        """Return what the summary of a run says of it."""
        edges = [key for key, value in self.values.items() if _is_edge(value, self.grid[key])]
        return {"chosen": dict(self.values), "chosen-at-edge": edges, "grid": dict(self.scores)}


def _is_edge(value: Any, values: Sequence[Any]) -> bool:
    numbers = set[float]()
    for each in values:
        with suppress(ValueError):
            numbers.add(float(each))
    with suppress(ValueError):
        return len(numbers) > 1 and float(value) in (min(numbers), max(numbers))
    return False


def metric_of(summary: Mapping[str, Any]) -> str:
    """Return the score by which a run is compared with others."""
    return str(summary.get("metric") or "accuracy")


def chosen_of(summary: Mapping[str, Any]) -> str:
    """Return what was chosen for a run, with a mark at the edge of the grid.

    Empty if nothing was.
    """
    edges = summary.get("chosen-at-edge", ())
    texts = []
    for key, value in summary.get("chosen", {}).items():
        text = f"{key}={value}"
        if key in edges:
            text += EDGE
        texts.append(text)
    return ", ".join(texts)
