"""How far batch normalization on each client's own mini-batches is from that on all clients' together.

Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?": the two mismatches that bias the
mean gradient (Property 3), the gradient deviation B_i (Assumption 1) and the heterogeneity V_i (Assumption 4).
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.diagnosis.layer_distances import Layer, LayerDistances, Squares
from fedbn_flwr.layerwise import Answer, Exchange, Kind, Mode, Observer, Request, combine, lockstep, shared_statistics
from fedbn_flwr.layerwise.exchange import normalized
from fedbn_flwr.layerwise.gradients import Batch, LossFunction
from fedbn_flwr.norm import bn_layers
from fedbn_flwr.randomness import derive, torch_generator

_STATISTICS: tuple[Kind, ...] = ("mean", "variance", "statistics")
_GRADIENTS: tuple[Kind, ...] = ("gradients",)
#: What all clients share while they compute their gradients; the rest is each client's own.
SHARED: dict[str, tuple[Kind, ...]] = {
    "nothing": (),
    "gradients": _GRADIENTS,
    "statistics": _STATISTICS,
    "both": (*_STATISTICS, *_GRADIENTS),
}


@dataclass(frozen=True)
class Measurement:
    """What one way to spread samples over clients does; squares are averaged over the draws before the root.

    With G_i(s) the gradient of client i when s is shared, and G = sum_i p_i G_i(both), the gradient of the global
    loss: `errors[s]` = ||sum_i p_i G_i(s) - G|| / ||G||, B_i = ||G_i(nothing) - G_i(both)|| in `deviation`,
    V_i = ||G_i(both) - G|| in `heterogeneity`, ||G|| in `gradient_norm`.
    """

    layers: list[Layer]
    errors: dict[str, float]
    deviation: list[float]
    heterogeneity: list[float]
    gradient_norm: float


@dataclass(frozen=True)
class Diagnosis:
    """The clients as they are, and the same samples dealt out to them anew at random: what chance alone does."""

    weights: list[float]
    batch_sizes: list[float]
    found: Measurement
    shuffled: Measurement


def diagnose(
    model: nn.Module,
    draws: Sequence[Sequence[Batch]],
    weights: Sequence[float],
    loss_function: LossFunction = F.cross_entropy,
    seed: int = 0,
) -> Diagnosis:
    """Measure a model, in the mode that it is in and without changing it; a draw is one mini-batch of each client."""
    check(model)
    sizes = [sum(len(targets) for _, targets in client) / len(draws) for client in zip(*draws, strict=True)]
    shuffled = [_dealt_anew(draw, torch_generator(seed, "deal", index)) for index, draw in enumerate(draws)]
    shares = normalized(weights)
    measure = partial(_measure, model, shares=shares, loss_function=loss_function, seed=seed)
    return Diagnosis(shares, sizes, measure(draws), measure(shuffled))


def check(model: nn.Module) -> None:
    """Refuse a model without BN, or with BN layers that compute something else than BN."""
    if not bn_layers(model):
        raise ValueError("the model has no BN layer, so there is nothing to diagnose")
    try:
        with shared_statistics(model, lambda request: Answer(request.tensor, request.count), final=False):
            pass
    except TypeError as error:
        raise ValueError(str(error)) from error


def overall(weights: Sequence[float], values: Sequence[float]) -> float:
    """The root of the weighted mean of squares over clients, as the sums of Theorem 1 are."""
    return sqrt(sum(weight * value**2 for weight, value in zip(weights, values, strict=True)))


def _measure(
    model: nn.Module, draws: Sequence[Sequence[Batch]], shares: Sequence[float], loss_function: LossFunction, seed: int
) -> Measurement:
    sums, distances = Squares(), LayerDistances(shares)
    for index, draw in enumerate(draws):
        step = partial(_gradients, model, draw, shares, loss_function, derive(seed, "diagnosis", index))
        # The published three exchanges a layer; "both" below takes two for the same, up to rounding.
        exact = step(SHARED["both"], mode="paper")
        whole = combine("mean", list(exact), shares)
        sums.add("norm", whole)
        sums.add("heterogeneity", exact - whole)
        for name, kinds in SHARED.items():
            found = step(kinds, observe=distances if name == "both" else None)
            sums.add(f"error {name}", combine("mean", list(found), shares) - whole)
            if name == "nothing":
                sums.add("deviation", found - exact)
    return Measurement(
        layers=distances.layers(),
        errors={name: sums.ratio(f"error {name}", "norm")[0] for name in SHARED},
        deviation=sums.mean("deviation", len(draws)),
        heterogeneity=sums.mean("heterogeneity", len(draws)),
        gradient_norm=sums.mean("norm", len(draws))[0],
    )


def _gradients(
    model: nn.Module,
    draw: Sequence[Batch],
    shares: Sequence[float],
    loss_function: LossFunction,
    seed: int,
    kinds: Collection[Kind],
    mode: Mode = "fused",
    observe: Observer | None = None,
) -> Tensor:
    """Each client's gradients by all parameters, a row a client, with only some kinds of values shared."""

    def step(batch: Batch, exchange: Exchange) -> Tensor:
        # The same parameters, but layers of the step's own. Not `final`: running statistics stay, and a client
        # may have one value a channel.
        replica = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        with shared_statistics(replica, partial(_shared_only, kinds, exchange), mode, final=False):
            loss = loss_function(replica(batch[0]), batch[1])
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in found])

    seeds = [derive(seed, "client", client) for client in range(len(draw))]
    return torch.stack(lockstep([partial(step, batch) for batch in draw], shares, seeds, observe))


def _shared_only(kinds: Collection[Kind], exchange: Exchange, request: Request) -> Answer:
    return exchange(request) if request.kind in kinds else Answer(request.tensor, request.count)


def _dealt_anew(draw: Sequence[Batch], generator: torch.Generator) -> list[Batch]:
    """The samples of all mini-batches, at random in mini-batches of the same sizes."""
    sizes = [len(targets) for _, targets in draw]
    inputs, targets = (torch.cat(parts) for parts in zip(*draw, strict=True))
    order = torch.randperm(len(targets), generator=generator).to(targets.device)
    return list(zip(inputs[order].split(sizes), targets[order].split(sizes), strict=True))
