"""An exchange of a layer-wise step: the clients' requests, and the answer to all of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

#: what an exchange averages
Kind = Literal["mean", "variance", "statistics", "gradients"]


@dataclass(frozen=True)
class Request:
    """A client's local values at one use of one BN layer, to be averaged with those of the others."""

    kind: Kind
    #: dotted path of the layer; the second use in a forward pass ends in "#2", the third in "#3"
    layer: str
    #: (C,) for a mean or a variance, (2, C) for both of them ("statistics") or for the gradients by both of them
    tensor: Tensor
    #: number of values of each channel that the tensor is computed from: B * H * W
    count: int


@dataclass(frozen=True)
class Answer:
    """The same values over all clients, with which every client goes on."""

    tensor: Tensor
    count: int


#: why values cannot be pooled; replies whose model is not finite are refused with the same words
NOT_FINITE, TOO_LARGE = "is not finite", "is too large to be pooled"

#: sends one request, and returns the answer, which may take days
Exchange = Callable[[Request], Answer]


@runtime_checkable
class FinishedExchange(Protocol):
    """An exchange that is told when the step is taken, and no request will follow."""

    def finish(self) -> None:
        """Take note."""


#: is called with every exchange: one request for each client
Observer = Callable[[Sequence[Request]], None]


class ExchangeError(ValueError):
    """The request of a client cannot be combined with the others'; `client` is the index of the client."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(f"client {client}: {reason}")
        self.client, self.reason = client, reason


class OrderError(ExchangeError):
    """A client is at another BN layer than most clients: its forward pass depends on its data."""


def combine(kind: Kind, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Combine the clients' tensors into the global tensor, in their dtype; the weights need not sum to one.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", equations 39 to 41:
    sum_i p_i t_i for a mean, a variance around the global mean, and gradients. For "statistics", local means
    m_i and variances v_i around them: mean = sum_i p_i m_i, variance = sum_i p_i (v_i + (m_i - mean)^2),
    which is the same number as (40), in one exchange instead of two. Sums are in float64, so that the order of
    the clients does not matter.
    """
    return _combine(kind, torch.stack(list(tensors)), weights)


def respond(requests: Sequence[Request], weights: Sequence[float]) -> Answer:
    """Return the answer to all clients; ExchangeError if their requests do not match, or cannot be pooled."""
    check_agreement([(request.kind, request.layer) for request in requests])
    kind, what = requests[0].kind, f"{requests[0].kind} of BN layer {requests[0].layer!r}"
    stacked = _stack(requests, what)
    if why_unusable(kind, stacked):
        reasons = [why_unusable(kind, values) for values in stacked]
        client = next(client for client, reason in enumerate(reasons) if reason)
        raise ExchangeError(client, f"the {what} {reasons[client]}")
    return Answer(_combine(kind, stacked, weights), sum(request.count for request in requests))


def why_unusable(kind: Kind, values: Tensor) -> str:
    """Return why values cannot be pooled, whatever the other clients' are; an empty string if they can.

    The values are one client's, or have a first dimension with a row for each client. They must be finite, and
    variances at least 0. They must also be so small that the pool is finite in their dtype. With M the largest
    v_i + m_i^2 of a client, and any weights p_i that sum to one,

        variance = sum_i p_i (v_i + (m_i - mean)^2) = sum_i p_i (v_i + m_i^2) - mean^2 <= M,   (m_i - mean)^2 <= 4 M.

    So the pool overflows only if some client's own v_i + m_i^2 is too large, and only such clients are refused. At most
    an eighth of the dtype's largest number is allowed: a factor of 4 for the square above, and of 2 for n / (n - 1) in
    running variances and for rounding. The same limit for a mean keeps mean^2 finite, which is in every client's
    variance around the global mean. For variances and gradients, it keeps differences of two of them finite.
    """
    if not values.is_floating_point():
        return f"is {values.dtype}, no floating-point numbers"
    largest = torch.finfo(values.dtype).max
    # below this norm all values pass; 2.4 us for 100 clients and 64 channels, where the sum of the pool takes 1.5 us
    if not torch.linalg.vector_norm(values).item() < largest**0.5 / 4:
        if not values.isfinite().all():
            return NOT_FINITE
        if not (_magnitudes(kind, values) <= largest / 8).all():
            return f"{TOO_LARGE} in {str(values.dtype).removeprefix('torch.')}"
    if kind in ("variance", "statistics"):
        variances = values if kind == "variance" else values[..., 1, :]
        if not (variances >= 0).all():
            return "has a negative variance"
    return ""


def _magnitudes(kind: Kind, values: Tensor) -> Tensor:
    """Return the numbers that must not be too large."""
    if kind == "mean":
        return values.square()
    if kind == "statistics":
        means, variances = values.unbind(-2)
        return means.square() + variances
    return values.abs()


def _combine(kind: Kind, stacked: Tensor, weights: Sequence[float]) -> Tensor:
    shares = torch.tensor(normalized(weights), dtype=torch.float64, device=stacked.device)
    rows = stacked.double()
    total = (shares @ rows.reshape(len(rows), -1)).view(rows.shape[1:])
    if kind == "statistics":
        total[1] += shares @ (rows[:, 0] - total[0]).square()
    combined: Tensor = total.to(stacked.dtype)
    return combined


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights p_i, which sum to one."""
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0:
        raise ValueError(f"weights must be finite, at least 0 and not all 0, got {list(weights)}")
    return [weight / total for weight in weights]


def check_agreement(places: Sequence[tuple[Kind, str]]) -> None:
    """Raise OrderError for the first client that asks for another kind or layer than most clients."""
    if len(set(places)) <= 1:
        return
    usual, _ = Counter(places).most_common(1)[0]
    for client, place in enumerate(places):
        if place != usual:
            here, there = (f"the {kind} of BN layer {layer!r}" for kind, layer in (place, usual))
            raise OrderError(client, f"is at {here} where the others are at {there}")


def _stack(requests: Sequence[Request], what: str) -> Tensor:
    """Return all clients' tensors, stacked; ExchangeError for the first client whose tensor has another form."""
    forms = [(request.tensor.shape, request.tensor.dtype) for request in requests]
    form, _ = Counter(forms).most_common(1)[0]
    for client, (shape, dtype) in enumerate(forms):
        if (shape, dtype) != form:
            others = f"{tuple(form[0])} {form[1]}"
            raise ExchangeError(client, f"the {what} is {tuple(shape)} {dtype}, the others' is {others}")
        if requests[client].count < 1:
            raise ExchangeError(client, f"the {what} is over {requests[client].count} values")
    return torch.stack([request.tensor for request in requests])
