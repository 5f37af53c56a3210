"""Distances of the clients' values at each BN layer from the global values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbn_flwr.layerwise import Requests, combine


@dataclass(frozen=True)
class Layer:
    """Distances from the global values at one use of a BN layer: one number a client.

    With means m, variances v, norms over the channels, and in a step in which all clients share everything:
    `mean` = ||m_i - m|| / ||sqrt(v)||, whose weighted mean of squares is the share of the variance that lies between
    clients; `variance` = ||v_i - v|| / ||v||; `gradients` the same of (sqrt(v) dF/dm, v dF/dv), which like the layer's
    output do not depend on the scale of its inputs.
    """

    name: str
    mean: list[float]
    variance: list[float]
    #: empty for a layer whose inputs are the data: no layer needs the gradients there
    gradients: list[float]


class SquareSums:
    """Sums of squared norms by name: one number for a vector, one a row for a matrix."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add the squared norm of a vector, or of each row of a matrix."""
        norms = values.norm(dim=-1).double().cpu().reshape(-1)
        self._sums[name] = self._sums.get(name, torch.zeros(1)) + norms.square()

    def root_mean(self, name: str, count: int) -> list[float]:
        """Return the roots of a sum divided by a count."""
        roots: list[float] = (self._sums[name] / count).sqrt().tolist()
        return roots

    def root_ratio(self, name: str, unit: str) -> list[float]:
        """Return the roots of a sum divided by another; 0 where both are 0, an empty list if nothing was added."""
        if name not in self._sums:
            return []
        part = self._sums[name]
        ratios: list[float] = torch.where(part == 0, part, part / self._sums[unit]).sqrt().tolist()
        return ratios


class LayerDistances:
    """Observes the exchanges of steps in which all clients share everything, and adds up the distances of `Layer`."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._squares = SquareSums()
        self._variances: dict[str, Tensor] = {}

    def __call__(self, requests: Requests) -> None:
        """Add one exchange: the requests of all clients."""
        kind, layer, values = requests.kind, requests.layer, requests.tensor.double()
        pooled = combine(kind, values, self._shares)
        if kind == "statistics":
            self._variances[layer] = pooled[1]
            self._add(layer, "mean", values[:, 0] - pooled[0], pooled[1].sqrt())
            self._add(layer, "variance", values[:, 1] - pooled[1], pooled[1])
        else:
            variance = self._variances[layer]
            scale = torch.stack([variance.sqrt(), variance])
            self._add(layer, "gradients", ((values - pooled) * scale).flatten(1), (pooled * scale).flatten())

    def _add(self, layer: str, what: str, differences: Tensor, unit: Tensor) -> None:
        self._squares.add(f"{what} {layer}", differences)
        self._squares.add(f"unit of {what} {layer}", unit)

    def layers(self) -> list[Layer]:
        """Return the distances of all layers, in the order of the forward pass."""
        kinds = ("mean", "variance", "gradients")
        ratios = {
            layer: [self._squares.root_ratio(f"{what} {layer}", f"unit of {what} {layer}") for what in kinds]
            for layer in self._variances
        }
        return [Layer(layer, *distances) for layer, distances in ratios.items()]
