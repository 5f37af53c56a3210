"""Sweeps: all layers exchanged at once, several times, by clients that hold nothing in between."""

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


#: What one client says of every layer, in the order of its pass.
Report = dict[str, Request]
#: For each layer what takes one client's own tensor to the global one.
Corrections = Mapping[str, Answer]

# Added to a variance before it divides: a client whose channel is constant has none.
_FLOOR = 1e-5


class Corrected:
    """An exchange that answers at once, from what earlier sweeps taught, and notes what was said.

    Sweeps replace algorithms 2 and 3 of Wang et al. by a fixed-point iteration. In every layer client i uses

        mean = m_i + o sqrt(v_i),   variance = v_i q,   A = a_i + alpha,   B = b_i + beta,

    m_i, v_i, a_i, b_i being its own values in this very pass (A and B: see `SharedBatchNorm`), and o, q,
    alpha, beta what would have taken those of the last sweep to the global ones, which the server pooled from
    all clients'. The first sweep (o = alpha = beta = 0, q = 1) is local BN. The inputs of the first layer
    depend on no statistics, so its corrections are exact after one sweep, those of the second after two, and
    all after S >= L sweeps (L uses of BN layers); S sweeps back and the gradients are exact too, from the
    last layer to the first. Correcting the current own values, instead of putting the last global ones in
    their place, keeps every layer normalized however wrong the corrections still are; the other way diverges.
    """

    def __init__(self, statistics: Corrections, gradients: Corrections) -> None:
        self._known: dict[str, Corrections] = {"statistics": statistics, "gradients": gradients}
        self.said: dict[str, Report] = {"statistics": {}, "gradients": {}}

    def __call__(self, request: Request) -> Answer:
        """The client's own tensor, corrected as far as is known."""
        self.said[request.kind][request.layer] = request
        correction = self._known[request.kind].get(request.layer)
        return Answer(request.tensor, request.count) if correction is None else correct(request, correction)


def forward_sweep(model: nn.Module, loss: Callable[[], Tensor], seed: int, statistics: Corrections) -> Report:
    """One client's part of a forward sweep: its own mean and variance of every layer."""
    exchange = Corrected(statistics, {})
    with OwnRandomness(seed).drawing(), torch.no_grad(), shared_statistics(model, exchange, final=False):
        loss()
    return exchange.said["statistics"]


def backward_sweep(
    model: nn.Module, loss: Callable[[], Tensor], seed: int, statistics: Corrections, gradients: Corrections
) -> Report:
    """One client's part of a backward sweep: its own gradients by mean and variance of every layer."""
    exchange = Corrected(statistics, gradients)
    with OwnRandomness(seed).drawing(), shared_statistics(model, exchange, final=False):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss(), parameters, allow_unused=True)
    return exchange.said["gradients"]


def pool(reports: Sequence[Report], weights: Sequence[float]) -> dict[str, Answer]:
    """The global values of every layer."""
    for places in zip_longest(*reports):
        check_agreement(places)
    return {layer: respond([report[layer] for report in reports], weights) for layer in reports[0]}


def correction(said: Request, pooled: Answer) -> Answer:
    """What takes the client's own tensor to the global one; the inverse of `correct`."""
    if said.kind == "gradients":
        return Answer(pooled.tensor - said.tensor, pooled.count)
    own, shared = said.tensor, pooled.tensor
    deviation = (own[1] + _FLOOR).sqrt()
    offset, ratio = (shared[0] - own[0]) / deviation, (shared[1] + _FLOOR) / (own[1] + _FLOOR)
    return Answer(torch.stack([offset, ratio]), pooled.count)


def correct(said: Request, known: Answer) -> Answer:
    """The client's own tensor, corrected."""
    if said.kind == "gradients":
        return Answer(said.tensor + known.tensor, known.count)
    mean, variance = said.tensor
    offset, ratio = known.tensor.to(said.tensor)
    mean = mean + offset * (variance + _FLOOR).sqrt()
    variance = ((variance + _FLOOR) * ratio - _FLOOR).clamp(min=0)
    return Answer(torch.stack([mean, variance]), known.count)


def settle(
    ask: Callable[[list[Corrections]], Sequence[Report]],
    weights: Sequence[float],
    sweeps: int | Auto,
    observe: Observer | None = None,
) -> tuple[list[Corrections], int]:
    """The server's part of all forward (or backward) sweeps: each client's corrections, and how many sweeps.

    `ask` hands every client its corrections, and returns what they said. `Auto` is for the forward sweeps; it
    takes as many backward ones, of which the error of the gradients depends as much.
    """
    corrections: list[Corrections] = [{} for _ in weights]
    pooled: dict[str, Answer] = {}
    sweep = 0
    for sweep in range(1, 1 + (sweeps.most if isinstance(sweeps, Auto) else sweeps)):
        before, reports = pooled, ask(corrections)
        if observe is not None:
            observe([list(report.values()) for report in reports])
        pooled = pool(reports, weights)
        corrections = [{key: correction(said, pooled[key]) for key, said in each.items()} for each in reports]
        exact = sweep >= len(pooled)
        if isinstance(sweeps, Auto) and (exact or movement(before, pooled) <= sweeps.tolerance):
            break
    return corrections, sweep


def movement(before: Mapping[str, Answer], after: Mapping[str, Answer]) -> float:
    """The largest relative change of a layer's variances, or of its means in units of their deviations."""
    if before.keys() != after.keys():
        return math.inf
    return max(_change(before[layer].tensor, after[layer].tensor) for layer in after)


def _change(before: Tensor, after: Tensor) -> float:
    variance = after[1] + _FLOOR
    scale = torch.stack([variance.sqrt(), variance])
    return float(((after - before).norm(dim=1) / scale.norm(dim=1)).max())
