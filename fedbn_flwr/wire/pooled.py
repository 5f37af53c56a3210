"""How replies are pooled, and a reply that is the mean of several: what workers and the server have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeGuard

import numpy as np
from flwr.app import RecordDict


@dataclass(frozen=True)
class Terms:
    """How replies are pooled."""

    #: by what arrays are weighted: `examples`, `uniform` or `tally`
    weighting: str
    #: a metric of which each node's own value is needed, beside the mean; empty for none
    tally: str = ""


class Summed(RecordDict):
    """The content of a reply that is the mean of several nodes' replies; nothing that was received is one."""

    #: by node, the partition that it named
    nodes: Mapping[int, int] = {}


def is_countable(value: object) -> TypeGuard[float]:
    """Return whether a node's metric counts in a tally: finite and not negative."""
    return isinstance(value, int | float) and 0 <= value < inf


def deviation(values: Iterable[object]) -> float:
    """Return the population's standard deviation of the values that count; infinite if none does."""
    usable = [value for value in values if is_countable(value)]
    return float(np.std(usable)) if usable else inf
