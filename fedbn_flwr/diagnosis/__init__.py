"""Distance of BN on each client's mini-batch from BN on all clients' mini-batches together.

Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?": the two
mismatches that bias the mean gradient (Property 3), the gradient deviation B_i (Assumption 1) and
the heterogeneity V_i (Assumption 4).
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.data.splits import Batch
from fedbn_flwr.device import where_exact
from fedbn_flwr.layerwise import Answer, Exchange, Kind, Observer, Requests, combine, lockstep
from fedbn_flwr.layerwise.exchange import to_shares
from fedbn_flwr.layerwise.shared_statistics import check_layers, shared_statistics
from fedbn_flwr.norm import freeze, lacks
from fedbn_flwr.randomness import derive, torch_generator

__all__ = ["Diagnosis", "Measurement", "check_model", "diagnose", "overall"]

#: a mini-batch of each client
DrawnBatches = Sequence[Batch]
LossFunction = Callable[[Tensor, Tensor], Tensor]
_STATISTICS: tuple[Kind, ...] = ("mean", "variance", "statistics")
_GRADIENTS: tuple[Kind, ...] = ("gradients",)
#: the kinds of values that all clients share in a step; each client uses its own values of the
#: other kinds
SHARED: dict[str, tuple[Kind, ...]] = {
    "nothing": (),
    "gradients": _GRADIENTS,
    "statistics": _STATISTICS,
    "both": (*_STATISTICS, *_GRADIENTS),
}


@dataclass(frozen=True)
class Layer:
    """Distances from the global values at one use of a BN layer: one number a client.

    With means m, variances v, norms over the channels, and in a step in which all clients share
    everything: `mean` = ||m_i - m|| / ||sqrt(v)||, whose weighted mean of squares is the share of
    the variance that lies between clients; `variance` = ||v_i - v|| / ||v||; `gradients` the same
    of (sqrt(v) dF/dm, v dF/dv), which like the layer's output do not depend on the scale of its
    inputs.
    """

    name: str
    mean: list[float]
    variance: list[float]
    #: empty for a layer whose inputs are the data: no layer needs the gradients there
    gradients: list[float]


@dataclass(frozen=True)
class Measurement:
    """Errors of the gradients under one partition.

    Squares are averaged over the draws before the root.

    With G_i(s) the gradient of client i when s is shared, and G = sum_i p_i G_i(both), the gradient
    of the global loss: `errors[s]` = ||sum_i p_i G_i(s) - G|| / ||G||, B_i = ||G_i(nothing) -
    G_i(both)|| in `deviation`, V_i = ||G_i(both) - G|| in `heterogeneity`, ||G|| in
    `gradient_norm`.
    """

    layers: list[Layer]
    errors: dict[str, float]
    deviation: list[float]
    heterogeneity: list[float]
    gradient_norm: float
    #: `errors["nothing"]` of each draw alone
    by_draw: list[float]


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of the clients' own mini-batches, and of the same samples dealt to the clients
    at random.

    The second shows what chance alone does.
    """

    weights: list[float]
    batch_sizes: list[float]
    actual: Measurement
    shuffled: Measurement


def diagnose(
    model: nn.Module,
    draws: Sequence[DrawnBatches],
    weights: Sequence[float],
    loss_function: LossFunction = F.cross_entropy,
    seed: int = 0,
    progress: Callable[[Sequence[DrawnBatches]], Iterable[DrawnBatches]] = iter,
) -> Diagnosis:
    """Measure a model, in its present mode and without changing it, on draws of one mini-batch of
    each client.

    Weights need not sum to 1. A model that `check` refuses is a ValueError. `progress` goes twice
    through the draws, such as `tqdm`.
    """
    check_model(model)
    sizes = [
        sum(len(targets) for _, targets in client) / len(draws)
        for client in zip(*draws, strict=True)
    ]
    shuffled = [
        _shuffled(draw, torch_generator(seed, "deal", index)) for index, draw in enumerate(draws)
    ]
    shares = to_shares(weights)
    measure = partial(_measure, model, shares=shares, loss_function=loss_function, seed=seed)
    # layers that keep their statistics in training do it here
    with freeze(model, statistics=False):
        actual = measure(progress(draws))
        return Diagnosis(shares, sizes, actual, measure(progress(shuffled)))


def check_model(model: nn.Module) -> None:
    """Refuse, with a ValueError, a model without BN layers or with variants of BN such as batch
    renormalization.
    """
    lacking = lacks(model, "bn")
    if lacking:
        raise ValueError(f"there is nothing to diagnose: {lacking}")
    check_layers(model)


def overall(weights: Sequence[float], values: Sequence[float]) -> float:
    """Return the root of the weighted mean of squares over clients, as in the sums of Theorem 1.

    The weights sum to 1.
    """
    return sqrt(sum(weight * value**2 for weight, value in zip(weights, values, strict=True)))


def _measure(
    model: nn.Module,
    draws: Iterable[DrawnBatches],
    shares: Sequence[float],
    loss_function: LossFunction,
    seed: int,
) -> Measurement:
    squares = defaultdict[str, list[Tensor]](list)
    distances = LayerDistances(shares)
    by_draw = list[float]()
    for index, draw in enumerate(draws):
        step = partial(
            _gradients, model, draw, shares, loss_function, derive(seed, "diagnosis", index)
        )
        exact = step(SHARED["both"], observe=distances)
        whole = combine("mean", exact, shares)
        squares["norm"].append(_squares(whole))
        squares["heterogeneity"].append(_squares(exact - whole))
        for name, kinds in SHARED.items():
            gradients = exact if name == "both" else step(kinds)
            squares[f"error {name}"].append(_squares(combine("mean", gradients, shares) - whole))
            if name == "nothing":
                squares["deviation"].append(_squares(gradients - exact))
                by_draw.append(
                    float((combine("mean", gradients, shares) - whole).norm() / whole.norm())
                )
    sums = {name: sum(values, torch.zeros(1)) for name, values in squares.items()}
    roots = {name: (values / len(by_draw)).sqrt().tolist() for name, values in sums.items()}
    return Measurement(
        layers=distances.layers(),
        errors={name: _root_ratio(sums[f"error {name}"], sums["norm"])[0] for name in SHARED},
        deviation=roots["deviation"],
        heterogeneity=roots["heterogeneity"],
        gradient_norm=roots["norm"][0],
        by_draw=by_draw,
    )


def _gradients(
    model: nn.Module,
    draw: DrawnBatches,
    shares: Sequence[float],
    loss_function: LossFunction,
    seed: int,
    kinds: Collection[Kind],
    observe: Observer | None = None,
) -> Tensor:
    """Return the clients' gradients by all parameters (clients x parameters), with some kinds of
    values shared.
    """

    def step(batch: Batch, exchange: Exchange) -> Tensor:
        shared = partial(_shared_only, kinds, exchange)
        other = replica(model)
        # not final: running statistics stay as they are, and a client may have one value a channel
        with shared_statistics(other, shared, final=False):
            loss = loss_function(other(batch[0]), batch[1])
            learning = [parameter for parameter in other.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, learning, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    seeds = [derive(seed, "client", client) for client in range(len(draw))]
    return where_exact(
        torch.stack(lockstep([partial(step, batch) for batch in draw], shares, seeds, observe))
    )


def replica(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters, and has buffers of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _shared_only(kinds: Collection[Kind], exchange: Exchange, requests: Requests) -> Answer:
    if requests.kind in kinds:
        return exchange(requests)
    return Answer(requests.tensor, requests.counts[0])


def _shuffled(draw: DrawnBatches, generator: torch.Generator) -> list[Batch]:
    """Deal the samples of all mini-batches at random into mini-batches of the same sizes."""
    sizes = [len(targets) for _, targets in draw]
    inputs, targets = (torch.cat(parts) for parts in zip(*draw, strict=True))
    order = torch.randperm(len(targets), generator=generator).to(targets.device)
    return list(zip(inputs[order].split(sizes), targets[order].split(sizes), strict=True))


def _squares(values: Tensor) -> Tensor:
    """Return the squared norm of a vector, or of each row of a matrix."""
    norms: Tensor = values.norm(dim=-1)
    return norms.cpu().double().reshape(-1).square()


def _root_ratio(part: Tensor, unit: Tensor) -> list[float]:
    """Return the roots of a sum of squares divided by another; 0 where both are 0."""
    ratios: list[float] = torch.where(part == 0, part, part / unit).sqrt().tolist()
    return ratios


class LayerDistances:
    """Observes the exchanges of steps in which all clients share everything, and adds up the
    distances of `Layer`.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        #: by layer and field of `Layer`, sums of squares of the differences and of what they are
        #: compared with
        self._sums: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._variances: dict[str, Tensor] = {}

    def __call__(self, requests: Requests) -> None:
        """Add one exchange: the requests of all clients."""
        kind = requests.kind
        layer = requests.layer
        values = where_exact(requests.tensor).double()
        pooled = combine(kind, values, self._shares)
        if kind == "statistics":
            self._variances[layer] = pooled[1]
            self._add(layer, "mean", values[:, 0] - pooled[0], pooled[1].sqrt())
            self._add(layer, "variance", values[:, 1] - pooled[1], pooled[1])
        else:
            variance = self._variances[layer]
            scale = torch.stack([variance.sqrt(), variance])
            self._add(
                layer,
                "gradients",
                ((values - pooled) * scale).flatten(1),
                (pooled * scale).flatten(),
            )

    def _add(self, layer: str, what: str, differences: Tensor, unit: Tensor) -> None:
        sums = self._sums.setdefault(layer, {})
        nothing = torch.zeros(1)
        part, whole = sums.get(what, (nothing, nothing))
        sums[what] = part + _squares(differences), whole + _squares(unit)

    def layers(self) -> list[Layer]:
        """Return the distances of all layers, in the order of the forward pass."""
        layers = []
        for layer, sums in self._sums.items():
            distances = {what: _root_ratio(*of_both) for what, of_both in sums.items()}
            layers.append(Layer(layer, **{"gradients": [], **distances}))
        return layers
