"""How far the clients' values at each BN layer are from the global ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbn_flwr.layerwise import Request, combine


@dataclass(frozen=True)
class Layer:
    """Each client's distances from the global values at one use of a BN layer.

    With means m, variances v, norms over the channels, and in a step in which all clients share everything:
    `mean` = ||m_i - m|| / ||sqrt(v)||, whose weighted mean of squares is the share of the variance that lies between
    clients; `variance` = ||v_i - v|| / ||v||; `gradients` the same of (sqrt(v) dF/dm, v dF/dv), which like the layer's
    output do not depend on the scale of its inputs.
    """

    name: str
    mean: list[float]
    variance: list[float]
    #: empty where nobody needs them: behind a layer whose inputs are the data
    gradients: list[float]


class Squares:
    """Sums of squares by name: one number for a vector, one a client for a matrix."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add the squared norm of a vector, or of each row."""
        norms = values.norm(dim=-1).double().cpu().reshape(-1)
        self._sums[name] = self._sums.get(name, torch.zeros(1)) + norms.square()

    def mean(self, name: str, count: int) -> list[float]:
        """The roots of a sum divided by a count."""
        roots: list[float] = (self._sums[name] / count).sqrt().tolist()
        return roots

    def ratio(self, name: str, unit: str) -> list[float]:
        """Relative to another sum: 0 where both are 0; nothing of what was never added."""
        if name not in self._sums:
            return []
        part = self._sums[name]
        ratios: list[float] = torch.where(part == 0, part, part / self._sums[unit]).sqrt().tolist()
        return ratios


class LayerDistances:
    """Sees the exchanges of exact steps, and adds up the distances of `Layer`."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._squares = Squares()
        self._variances: dict[str, Tensor] = {}

    def __call__(self, said: Sequence[Sequence[Request]]) -> None:
        """One exchange: a request of each client."""
        kind, layer = said[0][0].kind, said[0][0].layer
        own = torch.stack([requests[0].tensor for requests in said]).double()
        pooled = combine(kind, list(own), self._shares)
        if kind == "statistics":
            self._variances[layer] = pooled[1]
            self._add(layer, "mean", own[:, 0] - pooled[0], pooled[1].sqrt())
            self._add(layer, "variance", own[:, 1] - pooled[1], pooled[1])
        else:
            variance = self._variances[layer]
            scale = torch.stack([variance.sqrt(), variance])
            self._add(layer, "gradients", ((own - pooled) * scale).flatten(1), (pooled * scale).flatten())

    def _add(self, layer: str, what: str, differences: Tensor, unit: Tensor) -> None:
        self._squares.add(f"{what} {layer}", differences)
        self._squares.add(f"unit of {what} {layer}", unit)

    def layers(self) -> list[Layer]:
        """In the order of the forward pass."""
        kinds = ("mean", "variance", "gradients")
        ratios = {
            layer: [self._squares.ratio(f"{what} {layer}", f"unit of {what} {layer}") for what in kinds]
            for layer in self._variances
        }
        return [Layer(layer, *distances) for layer, distances in ratios.items()]
