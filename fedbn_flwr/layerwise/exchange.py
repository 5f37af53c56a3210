"""What the clients of a layer-wise step tell each other, and how it is combined."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["mean", "variance", "statistics", "gradients"]


@dataclass(frozen=True)
class Request:
    """What one client says at one use of one BN layer."""

    kind: Kind
    #: the layer's dotted path; from its second use in a forward pass on, with "#2", "#3", ... behind it
    layer: str
    #: (C,) for a mean or a variance, (2, C) for both of them ("statistics") or the gradients by both of them
    tensor: Tensor
    #: how many values of each channel are behind the tensor: B * H * W
    count: int


@dataclass(frozen=True)
class Answer:
    """The same over all clients, which is what each of them goes on with."""

    tensor: Tensor
    count: int


#: Says one thing and returns, maybe days later, what all clients together said.
Exchange = Callable[[Request], Answer]
#: Sees every exchange: for each client what it said, for one layer or (in a sweep) for all of them.
Observer = Callable[[Sequence[Sequence[Request]]], None]


class ExchangeError(ValueError):
    """What a client said cannot be combined; `client` is its index."""

    def __init__(self, client: int, message: str) -> None:
        super().__init__(f"client {client}: {message}")
        self.client = client


class OrderError(ExchangeError):
    """A client is at another BN layer than most are: its forward pass depends on its data."""


def combine(kind: Kind, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The global tensor, in the clients' dtype, from the clients' own; the weights need not sum to one.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", equations 39 to 41:
    sum_i p_i t_i for a mean, a variance around the global mean, and gradients. For "statistics", local means
    m_i and variances v_i around them: mean = sum_i p_i m_i, variance = sum_i p_i (v_i + (m_i - mean)^2),
    which is the same number as (40), in one exchange instead of two. Added up in float64, so that the order
    of the clients does not matter.
    """
    return _combine(kind, torch.stack(list(tensors)), weights)


def respond(requests: Sequence[Request], weights: Sequence[float]) -> Answer:
    """What goes back to every client, after a check that all of them speak of the same and of numbers."""
    check_agreement([(request.kind, request.layer) for request in requests])
    tensor = _combine(requests[0].kind, _sound(requests), weights)
    return Answer(tensor, sum(request.count for request in requests))


def _combine(kind: Kind, stacked: Tensor, weights: Sequence[float]) -> Tensor:
    shares = torch.tensor(normalized(weights), dtype=torch.float64, device=stacked.device)
    rows = stacked.double()
    total = torch.tensordot(shares, rows, dims=1)
    if kind == "statistics":
        total[1] += shares @ (rows[:, 0] - total[0]).square()
    combined: Tensor = total.to(stacked.dtype)
    return combined


def normalized(weights: Sequence[float]) -> list[float]:
    """The weights p_i, which sum to one."""
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0:
        raise ValueError(f"weights must be finite, at least 0 and not all 0, got {list(weights)}")
    return [weight / total for weight in weights]


def check_agreement(places: Sequence[Hashable]) -> None:
    """Refuse the first client that is elsewhere than most are."""
    usual, _ = Counter(places).most_common(1)[0]
    for client, place in enumerate(places):
        if place != usual:
            raise OrderError(client, f"is at {place} of the exchange where the others are at {usual}")


def _sound(requests: Sequence[Request]) -> Tensor:
    """All clients' tensors, stacked; an error names the first client whose tensor cannot be combined."""
    forms = [(request.tensor.shape, request.tensor.dtype) for request in requests]
    form, _ = Counter(forms).most_common(1)[0]
    what = f"{requests[0].kind} of BN layer {requests[0].layer!r}"
    for client, own in enumerate(forms):
        if own != form:
            found = f"{tuple(own[0])} {own[1]}"
            raise ExchangeError(client, f"the {what} is {found}, the others' is {tuple(form[0])} {form[1]}")
        if requests[client].count < 1:
            raise ExchangeError(client, f"the {what} is over {requests[client].count} values")
    stacked = torch.stack([request.tensor for request in requests])
    _refuse(stacked.isfinite(), f"the {what} is not finite")
    if requests[0].kind in ("variance", "statistics"):
        variances = stacked if requests[0].kind == "variance" else stacked[:, -1]
        _refuse(variances >= 0, f"the {what} has a negative variance")
    return stacked


def _refuse(sound: Tensor, message: str) -> None:
    """Look at all clients at once, and only if something is wrong for whose it is."""
    if not sound.all():
        raise ExchangeError(int((~sound).flatten(1).any(1).nonzero()[0]), message)
