"""Weighted sums of states, where the states are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.device import constant, where_exact
from fedbn_flwr.state.flat import FlatState, join, joined_rows, to_host


class Sums:
    """The sum of states under weights: in float64 on their device, of other dtypes the largest.

    A device that has no float64 leaves its sums to the CPU.
    """

    def __init__(self, stacked: Mapping[str, Tensor], weights: tuple[float, ...]) -> None:
        """Add up the rows of stacked tensors."""
        self.layout, rows = joined_rows(stacked, len(weights))
        #: by the dtype of the states
        self._totals = {dtype: _sum_rows(values, weights) for dtype, values in rows.items()}

    def bounds(self) -> list[Tensor]:
        """Return the least and the largest sum of each dtype; what is no number is both."""
        found: list[Tensor] = []
        for total in self._totals.values():
            if total.is_floating_point() and len(total):
                found += [bound.view(1) for bound in torch.aminmax(total)]
        return found

    def add(self, others: "Sums") -> None:
        """Add the sum of other states of the same layout."""
        for dtype, total in self._totals.items():
            other = others._totals[dtype]
            if total.is_floating_point():
                total.add_(other)
            else:
                torch.maximum(total, other, out=total)

    def mean(self, weight: float) -> FlatState:
        """Return the sum divided by the weight of all states, in their dtypes.

        It comes into the CPU's memory in one piece.
        """
        # numbers of more bytes begin where their size divides the place
        totals = sorted(self._totals.items(), key=lambda item: -item[0].itemsize)
        if not totals:
            return FlatState(self.layout, {})
        pieces = [_divided(total, weight, dtype).view(torch.uint8) for dtype, total in totals]
        whole = to_host(join(pieces))
        buffers = {}
        start = 0
        for dtype, total in totals:
            end = start + dtype.itemsize * len(total)
            buffers[dtype] = whole[start:end].view(dtype)
            start = end
        return FlatState(self.layout, buffers)


def _sum_rows(rows: Tensor, weights: tuple[float, ...]) -> Tensor:
    if not rows.is_floating_point():
        return rows.amax(0)
    rows = where_exact(rows)
    return constant(weights, torch.float64, rows.device) @ rows.double()


def _divided(total: Tensor, weight: float, dtype: np.dtype[Any]) -> Tensor:
    if not total.is_floating_point():
        return total
    like = torch.from_numpy(np.empty(0, dtype))
    mean = torch.empty_like(total, dtype=like.dtype)
    # divided by a number of the CPU, a GPU multiplies by its inverse
    return torch.div(total, constant((weight,), torch.float64, total.device), out=mean)
