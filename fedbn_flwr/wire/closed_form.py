"""The last layer of a network in closed form, from sums over samples.

With features x of N samples, what goes into the layer, and targets y, one-hot labels or numbers:

    second = sum x' x'^T / N,   cross = sum x' y^T / N,   x' = (x, 1)

Sums do not know who added them: the means of nodes' means, weighted by their numbers of samples,
are those of all samples together. Fani, Camoriano, Caputo and Ciccone, Accelerating Heterogeneous
Federated Learning with Closed-form Classifiers, ICML 2024 (Fed3R), solve ridge regression from
`second` and `cross`; Legate et al., Guiding the Last Layer in Federated Learning with Pre-trained
Models, NeurIPS 2023 (FedNCM), take class means, for which `cross` is enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

#: the passes of nodes that an instruction names: moments, class means only, and a node's own head
MOMENTS_PASS = "head-moments"
MEANS_PASS = "class-means"
OWN_PASS = "own-head"
#: how a layer is asked for that is the network's last one, as by `trainable`
LAST = "head"
#: the names under which `cross` travels, by whether targets are one-hot labels: nodes of two kinds
#: have no entries in common
CROSS = {True: "with-labels", False: "with-numbers"}
#: the weight of the penalty, as a share of the features' mean variance
RIDGE = 0.1
#: the largest share of the right side that a solution may leave over
TOLERANCE = 1e-6


@dataclass(frozen=True)
class HeadMoments:
    """Means over samples of what goes into a layer, in float64."""

    #: of features and targets: a row for each feature and one for the number 1
    cross: Tensor
    #: of features with features, in the same rows; None if only class means are asked for
    second: Tensor | None
    #: whether targets are one-hot labels
    has_labels: bool = True

    def pack(self) -> dict[str, Tensor]:
        """Return the arrays that travel: of a symmetric matrix the upper triangle."""
        packed = {CROSS[self.has_labels]: self.cross}
        if self.second is not None:
            rows, columns = torch.triu_indices(*self.second.shape).unbind()
            packed["second"] = self.second[rows, columns]
        return packed

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor]) -> Self:
        """Return what `pack` has packed."""
        has_labels = CROSS[True] in packed
        cross = packed[CROSS[has_labels]]
        if "second" not in packed:
            return cls(cross, None, has_labels)
        size = len(cross)
        second = cross.new_zeros(size, size)
        rows, columns = torch.triu_indices(size, size).unbind()
        second[rows, columns] = packed["second"]
        second[columns, rows] = packed["second"]
        return cls(cross, second, has_labels)

    def plus(self, other: Self, share: float) -> Self:
        """Return the means with those of other samples, which are `share` times as many."""
        assert self.second is not None
        assert other.second is not None
        total = 1 + share
        return type(self)(
            (self.cross + share * other.cross) / total,
            (self.second + share * other.second) / total,
            self.has_labels,
        )

    def solve(self, ridge: float = RIDGE, bias: bool = True) -> tuple[Tensor, Tensor]:
        """Return weight and bias of ridge regression; the bias is not penalized.

        With centred moments G (features) and R (features with targets) of d features, they are

            W = (G + ridge trace(G) / d I)^-1 R,   b = mean y - W^T mean x

        Without a bias, moments are not centred and b is 0. ValueError if the system cannot be
        solved.
        """
        assert self.second is not None
        features = self.second[:-1, :-1]
        targets = self.cross[:-1]
        weight_of_one = self.second[-1, -1]
        means = self.second[-1, :-1]
        mean_target = self.cross[-1]
        if bias:
            features = features - means.outer(means) / weight_of_one
            targets = targets - means.outer(mean_target) / weight_of_one
        penalty = ridge * features.trace() / len(features)
        system = features + penalty * torch.eye(len(features), dtype=features.dtype)
        factor, info = torch.linalg.cholesky_ex(system)
        solution = torch.cholesky_solve(targets, factor)
        left_over = torch.linalg.matrix_norm(system @ solution - targets)
        if info or not left_over <= TOLERANCE * torch.linalg.matrix_norm(targets):
            raise ValueError(
                f"the features' moments are singular with ridge={ridge:g}: try a larger one"
            )
        offset = torch.zeros_like(mean_target)
        if bias:
            offset = (mean_target - means @ solution) / weight_of_one
        return solution.T, offset

    def class_means(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the layer whose largest output is the nearest class mean.

        -|x - m|^2 / 2 and m x - |m|^2 / 2 differ by a number that all classes share. A class
        without samples has an output below the others, where no feature is negative.
        """
        shares = self.cross[-1]
        means = (self.cross[:-1] / shares.clamp(min=torch.finfo(shares.dtype).tiny)).T
        means = torch.where(shares[:, None] > 0, means, 0.0)
        bias = -means.square().sum(1) / 2
        return means, torch.where(shares > 0, bias, 2 * bias.min())


def last_matrix(shapes: Mapping[str, tuple[int, ...]], asked: str) -> str:
    """Return the name of the layer that is asked for, in a state of entries with these shapes.

    `LAST` is the last one with a matrix of weights. ValueError if there is none.
    """
    layers = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    ]
    if not layers:
        raise ValueError("a head in closed form needs an nn.Linear, and the model has none")
    if asked == LAST:
        return layers[-1]
    if asked not in layers:
        raise ValueError(f"there is no linear layer {asked!r}; there are: {', '.join(layers)}")
    return asked


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """Return the layer that a head in closed form takes the place of; ValueError if it cannot."""
    layers = {key: layer for key, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    if name not in layers:
        raise ValueError(
            f"layer {name!r} is no nn.Linear: choose the one that gives the model's output, "
            f"closed-form=NAME; there are: {', '.join(layers) or 'none'}"
        )
    return layers[name]
