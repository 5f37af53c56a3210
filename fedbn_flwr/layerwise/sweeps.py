"""Sweeps: all layers exchanged at once, several times, by clients that hold nothing between two sweeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn

from fedbn_flwr.layerwise.exchange import Answer, Observer, Request, check_agreement, respond
from fedbn_flwr.layerwise.shared_statistics import shared_statistics
from fedbn_flwr.randomness import OwnRandomness


@dataclass(frozen=True)
class Auto:
    """Stop when a sweep moves no layer's global statistics by more than the tolerance, or all are exact."""

    tolerance: float = 0.01
    #: the cap, each way
    most: int = 10


#: one client's requests of all layers, by layer, in the order of the client's pass
Report = dict[str, Request]
#: by layer, what takes one client's local tensor to the global tensor
Corrections = Mapping[str, Answer]

# Added to a variance before it divides: a client whose channel is constant has none.
_FLOOR = 1e-5


class Corrected:
    """An exchange that answers at once, by corrections from earlier sweeps, and keeps the requests.

    Sweeps replace algorithms 2 and 3 of Wang et al. by a fixed-point iteration. In every layer client i uses

        mean = m_i + o sqrt(v_i),   variance = v_i q,   A = a_i + alpha,   B = b_i + beta,

    m_i, v_i, a_i, b_i being the client's local values in this very pass (A and B: see `SharedBatchNorm`), and o, q,
    alpha, beta what would have taken those of the last sweep to the global ones, which the server pooled from
    all clients'. The first sweep (o = alpha = beta = 0, q = 1) is local BN. The inputs of the first layer
    depend on no statistics, so its corrections are exact after one sweep, those of the second after two, and
    all after S >= L sweeps (L uses of BN layers). After S sweeps back the gradients are exact too, from the last
    layer to the first. Correcting the current local values, instead of replacing them by the last global ones,
    keeps every layer normalized however wrong the corrections still are; replacing them diverges.
    """

    def __init__(self, statistics: Corrections, gradients: Corrections) -> None:
        self._corrections: dict[str, Corrections] = {"statistics": statistics, "gradients": gradients}
        #: by kind, the requests so far
        self.requests: dict[str, Report] = {"statistics": {}, "gradients": {}}

    def __call__(self, request: Request) -> Answer:
        """Return the request's tensor, corrected if there is a correction of its layer."""
        self.requests[request.kind][request.layer] = request
        correction = self._corrections[request.kind].get(request.layer)
        return Answer(request.tensor, request.count) if correction is None else correct(request, correction)


def forward_sweep(model: nn.Module, loss: Callable[[], Tensor], seed: int, statistics: Corrections) -> Report:
    """Run one client's forward sweep; return its local mean and variance of every layer."""
    exchange = Corrected(statistics, {})
    with OwnRandomness(seed).drawing(), torch.no_grad(), shared_statistics(model, exchange, final=False):
        loss()
    return exchange.requests["statistics"]


def backward_sweep(
    model: nn.Module, loss: Callable[[], Tensor], seed: int, statistics: Corrections, gradients: Corrections
) -> Report:
    """Run one client's backward sweep; return its local gradients by mean and variance of every layer."""
    exchange = Corrected(statistics, gradients)
    with OwnRandomness(seed).drawing(), shared_statistics(model, exchange, final=False):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss(), parameters, allow_unused=True)
    return exchange.requests["gradients"]


def pool(reports: Sequence[Report], weights: Sequence[float]) -> dict[str, Answer]:
    """Return the global values of every layer; ExchangeError if the clients' reports do not match."""
    for places in zip_longest(*reports):
        check_agreement(places)
    return {layer: respond([report[layer] for report in reports], weights) for layer in reports[0]}


def correction(request: Request, pooled: Answer) -> Answer:
    """Return what takes the client's local tensor to the global tensor; the inverse of `correct`.

    Several clients' tensors may have a row each.
    """
    if request.kind == "gradients":
        return Answer(pooled.tensor - request.tensor, pooled.count)
    (mean, variance), shared = request.tensor.unbind(-2), pooled.tensor
    offset = (shared[0] - mean) / (variance + _FLOOR).sqrt()
    ratio = (shared[1] + _FLOOR) / (variance + _FLOOR)
    return Answer(torch.stack([offset, ratio], -2), pooled.count)


def correct(request: Request, correction: Answer) -> Answer:
    """Return the client's local tensor, corrected; stacked clients' tensors have a row for each client."""
    if request.kind == "gradients":
        return Answer(request.tensor + correction.tensor.to(request.tensor), correction.count)
    mean, variance = request.tensor.unbind(-2)
    offset, ratio = correction.tensor.to(request.tensor).unbind(-2)
    mean = mean + offset * (variance + _FLOOR).sqrt()
    variance = ((variance + _FLOOR) * ratio - _FLOOR).clamp(min=0)
    return Answer(torch.stack([mean, variance], -2), correction.count)


def settle_corrections(
    ask: Callable[[list[Corrections]], Sequence[Report]],
    clients: int,
    weigh: Callable[[], Sequence[float]],
    sweeps: int | Auto,
    observe: Observer | None = None,
    start: Sequence[Corrections] | None = None,
) -> tuple[list[Corrections], int]:
    """Run the server's part of all forward (or backward) sweeps; return each client's corrections, and how many sweeps.

    `ask` hands every client its corrections, and returns the clients' reports. `weigh` returns the clients' weights; it
    is called after `ask`. `Auto` is for the forward sweeps; there are as many backward sweeps, on which the error of
    the gradients depends as much. With `start`, the first sweep is under these corrections of each client.
    """
    corrections: list[Corrections] = [{} for _ in range(clients)] if start is None else list(start)
    pooled: dict[str, Answer] = {}
    sweep = 0
    for sweep in range(1, 1 + (sweeps.most if isinstance(sweeps, Auto) else sweeps)):
        before, reports = pooled, ask(corrections)
        if observe is not None:
            observe([list(report.values()) for report in reports])
        pooled = pool(reports, weigh())
        corrections = [{key: correction(each, pooled[key]) for key, each in report.items()} for report in reports]
        exact = sweep >= len(pooled)
        if isinstance(sweeps, Auto) and (exact or movement(before, pooled) <= sweeps.tolerance):
            break
    return corrections, sweep


def movement(before: Mapping[str, Answer], after: Mapping[str, Answer]) -> float:
    """Return the largest relative change of a layer's variances, or of its means in units of their deviations."""
    if before.keys() != after.keys():
        return math.inf
    return max(_change(before[layer].tensor, after[layer].tensor) for layer in after)


def _change(before: Tensor, after: Tensor) -> float:
    variance = after[1] + _FLOOR
    scale = torch.stack([variance.sqrt(), variance])
    return float(((after - before).norm(dim=1) / scale.norm(dim=1)).max())
