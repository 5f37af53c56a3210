"""The training dynamics of FixBN's Figure 3: a row for every BN layer in every round.

The clients' half is `fedbn_flwr/client/rules/dynamics.py`.
"""

from collections.abc import Sequence
from math import nan
from statistics import fmean
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedbn_flwr import wire
from fedbn_flwr.strategies import NodeReply

#: the columns that clients report, in their order
REPORTED = ("batch-change", "local-distance", "window-variance")
STATISTICS = ("running_var", "running_mean")


class DynamicsTable:
    """Joins what clients report of a round with how far the global statistics moved in it.

    - `global-change`: the L1 norm of the change of the layer's accumulated statistics on the server (figure 3 a, blue);
      null where the server has none.
    - `batch-change`, `local-distance` (figure 3 a), `window-variance` (b): means over the round's clients.
    - `loss`: the training loss, averaged over the samples (c).
    """

    def __init__(self) -> None:
        self._before: dict[str, np.ndarray[Any, Any]] = {}

    def begin(self, arrays: ArrayRecord) -> None:
        """Take the model that the first round, or the first one after a resumption, begins with."""
        self._before = _statistics(arrays)

    def rows(
        self, server_round: int, arrays: ArrayRecord, replies: Sequence[NodeReply], loss: float | None
    ) -> list[dict[str, Any]]:
        """Return the rows of a round, by layer, in the order of the model."""
        before, self._before = self._before, _statistics(arrays)
        reported = [key for key in (replies[0].metrics if replies else ()) if key.startswith(wire.DYNAMICS)]
        layers = [key for key in reported if all(isinstance(reply.metrics.get(key), list) for reply in replies)]
        return [
            {
                "round": server_round,
                "layer": key.removeprefix(wire.DYNAMICS),
                "global-change": self._change(key.removeprefix(wire.DYNAMICS), before),
                **{name: _mean(replies, key, column) for column, name in enumerate(REPORTED)},
                "loss": loss,
            }
            for key in layers
        ]

    def _change(self, layer: str, before: dict[str, np.ndarray[Any, Any]]) -> float:
        names = [f"{layer}.{name}" for name in STATISTICS]
        if not all(name in before and name in self._before for name in names):
            return nan
        return float(sum(np.abs(self._before[name] - before[name]).sum() for name in names))


def _statistics(arrays: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    """Return the running statistics of a model, as float64."""
    names = [name for name in arrays if name.rpartition(".")[2] in STATISTICS]
    return {name: arrays[name].numpy().astype(np.float64) for name in names}


def _mean(replies: Sequence[NodeReply], key: str, column: int) -> float:
    """Return the mean over the clients that have the number; NaN if none has it yet."""
    values = [reply.metrics[key][column] for reply in replies]
    known = [value for value in values if value == value]
    return fmean(known) if known else nan
