"""An exchange of a layer-wise step: the requests of all clients as one batch, and the answer to all
of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: what an exchange averages
Kind = Literal["mean", "variance", "statistics", "gradients"]


class Pool(NamedTuple):
    """The clients whose values are combined in one row."""

    clients: int
    weight: float
    #: the row is in float64, whatever the clients' values are in
    dtype: torch.dtype


@dataclass(frozen=True)
class Requests:
    """The local values of K clients at one use of one BN layer, to be averaged with those of the
    others.

    Where clients are reached together, a row may be the pool of several, and then says so.
    """

    kind: Kind
    #: dotted path of the layer; the second use in a forward pass ends in "#2", the third in "#3"
    layer: str
    #: a row for each client: (K, C) for means or variances, (K, 2, C) for both of them
    #: ("statistics") or for the gradients by both of them
    tensor: Tensor
    #: by client, the number of values of each channel that its row is computed from: B * H * W
    counts: tuple[int, ...]
    #: by row; empty where each row is one client's
    pools: tuple[Pool, ...] = ()
    #: what the layer adds to variances before it divides by them
    eps: float = 0.0

    @property
    def clients(self) -> int:
        """The number of clients."""
        if self.pools:
            return sum(pool.clients for pool in self.pools)
        return len(self.counts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the clients' values."""
        if self.pools:
            return self.pools[0].dtype
        return self.tensor.dtype

    @classmethod
    def of_client(cls, kind: Kind, layer: str, values: Tensor, count: int) -> "Requests":
        """Return the request of one client as a batch, which is a view of its values."""
        return cls(kind, layer, values.unsqueeze(0), (count,))


@dataclass(frozen=True)
class Answer:
    """The same values over all clients, with which every client goes on."""

    #: (C,) or (2, C); or with a row for each client, where each has an answer of its own
    tensor: Tensor
    count: int
    #: by client, its weight in the answer; empty where the requests were pools
    weights: tuple[float, ...] = ()


class Why(Enum):
    """The kind of a reason for which something of a node cannot be used, where that decides what
    follows.
    """

    OTHER = auto()
    #: numbers that are not finite, or too large
    INFINITE = auto()
    #: a client did not do what the method asks for
    NOT_OBEYED = auto()


class Fault(NamedTuple):
    """Why values cannot be pooled, in words that follow their name."""

    words: str
    why: Why = Why.OTHER


NOT_FINITE = Fault("is not finite", Why.INFINITE)
TOO_LARGE = Fault("is too large to be pooled", Why.INFINITE)
#: the largest number that a node may send, in any dtype, and the most examples: float64 holds all
#: counts up to it
LARGEST = torch.finfo(torch.float32).max
MOST = 2**53

#: sends requests, and returns the answer; where exchanges are messages, it waits for the slowest
#: node
Exchange = Callable[[Requests], Answer]

#: is called with the requests of every exchange
Observer = Callable[[Requests], None]


#: combines the clients' rows of one kind, under weights: `combine`, or a robust rule in its place
Combiner = Callable[[Kind, Tensor, Sequence[float]], Tensor]


class ExchangeError(ValueError):
    """The request of a client cannot be combined with the others'.

    `client` is the row of the client.
    """

    def __init__(self, client: int, reason: str, why: Why = Why.OTHER) -> None:
        super().__init__(f"client {client}: {reason}")
        self.client = client
        self.reason = reason
        self.why = why


class OrderError(ExchangeError):
    """A client is at another BN layer than most clients: its forward pass depends on its data."""


def join_requests(parts: Sequence[Requests], order: Sequence[int] | None = None) -> Requests:
    """Return several batches as one.

    `order` are the clients' positions in the parts, in the order of the new rows.

    OrderError names the first row at another kind or layer than most, ExchangeError the first of
    another shape or dtype than most. A single batch whose order stays is returned as it is, without
    a copy.
    """
    part_of = [part for part in parts for _ in part.counts]
    positions = list(range(len(part_of)))
    if len(parts) == 1 and (order is None or list(order) == positions):
        return parts[0]
    if order is not None and sorted(order) != positions:
        raise ValueError(
            f"there are requests of {len(positions)} clients where {len(order)} are expected"
        )
    if order is not None:
        positions = list(order)
    clients = [part_of[position] for position in positions]
    name = _most_common(_name, parts)
    form = _most_common(_form, parts)
    for row, part in enumerate(clients):
        if _name(part) != name:
            raise OrderError(row, f"is at the {_name(part)} where the others are at the {name}")
    for row, part in enumerate(clients):
        if _form(part) != form:
            raise ExchangeError(row, f"the {name} is {_form(part)}, the others' is {form}")
    tensor = torch.cat([part.tensor for part in parts])
    counts = [count for part in parts for count in part.counts]
    pools = [pool for part in parts for pool in part.pools]
    return Requests(
        clients[0].kind,
        clients[0].layer,
        tensor[positions],
        tuple(counts[position] for position in positions),
        tuple(pools[position] for position in positions) if pools else (),
    )


def check_requests(requests: Requests) -> None:
    """Raise ExchangeError for the first client whose values cannot be pooled."""
    for client, count in enumerate(requests.counts):
        if count < 1:
            raise ExchangeError(client, f"the {_name(requests)} is over {count} values")
    if why_unusable(requests.kind, requests.tensor):
        faults = [why_unusable(requests.kind, values) for values in requests.tensor]
        client, fault = next((client, fault) for client, fault in enumerate(faults) if fault)
        raise ExchangeError(client, f"the {_name(requests)} {fault.words}", fault.why)


def pool_requests(requests: Requests, weights: Sequence[float]) -> Requests:
    """Return the clients' requests as one row, their pool; ExchangeError if some client's values
    cannot be pooled.

    The pool of pools is that of all clients, as the mean and the variance of each are kept, in
    float64, and no sums of squares, which lose digits.
    """
    check_requests(requests)
    weight = sum(weights)
    # nobody counts: the row has no weight, but must be there
    if not (weight > 0):
        weights = [1.0] * len(weights)
    tensor = combine(requests.kind, requests.tensor.double(), weights)
    pools = (Pool(len(weights), weight, requests.dtype),)
    return Requests(
        requests.kind, requests.layer, tensor.unsqueeze(0), (sum(requests.counts),), pools
    )


def combine(kind: Kind, rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Combine the clients' rows into the global tensor, in their dtype.

    The weights need not sum to one.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", equations 39
    to 41: sum_i p_i t_i for a mean, a variance around the global mean, and gradients. For
    "statistics", local means m_i and variances v_i around them: mean = sum_i p_i m_i, variance =
    sum_i p_i (v_i + (m_i - mean)^2), which is the same number as (40), in one exchange instead of
    two. Sums are in float64, so that the order of the clients does not matter.
    """
    return weighted(
        kind, rows, torch.tensor(to_shares(weights), dtype=torch.float64, device=rows.device)
    )


def weighted(kind: Kind, rows: Tensor, shares: Tensor) -> Tensor:
    """Combine rows as `combine` does, under weights in float64 that sum to one."""
    values = rows.double()
    total = (shares @ values.reshape(len(values), -1)).view(values.shape[1:])
    if kind == "statistics":
        total[1] += shares @ (values[:, 0] - total[0]).square()
    combined: Tensor = total.to(rows.dtype)
    return combined


def respond(requests: Requests, weights: Sequence[float], combiner: Combiner = combine) -> Answer:
    """Return the answer to all clients; ExchangeError if some client's values cannot be pooled.

    Another `combiner` than `combine` needs single values, so that the answer must not hold the
    weights that let workers pool their clients' values.
    """
    check_requests(requests)
    if requests.pools:
        tensor = combine(requests.kind, requests.tensor, [pool.weight for pool in requests.pools])
        return Answer(tensor.to(requests.dtype), sum(requests.counts))
    tensor = combiner(requests.kind, requests.tensor, weights)
    return Answer(tensor, sum(requests.counts), tuple(weights) if combiner is combine else ())


def why_unusable(kind: Kind, values: Tensor) -> Fault | None:
    """Return why values cannot be pooled, whatever the other clients' are; None if they can.

    The values are one client's, or have a first dimension with a row for each client. They must be
    finite, and variances at least 0. They must also be so small that the pool is finite in their
    dtype. With M the largest v_i + m_i^2 of a client, and any weights p_i that sum to one,

        variance = sum_i p_i (v_i + (m_i - mean)^2) = sum_i p_i (v_i + m_i^2) - mean^2 <= M,
        (m_i - mean)^2 <= 4 M.

    So the pool overflows only if some client's own v_i + m_i^2 is too large, and only such clients
    are refused. At most an eighth of the dtype's largest number is allowed: a factor of 4 for the
    square above, and of 2 for n / (n - 1) in running variances and for rounding. The same limit for
    a mean keeps mean^2 finite, which is in every client's variance around the global mean. For
    variances and gradients, it keeps differences of two of them finite.
    """
    if not values.is_floating_point():
        return Fault(f"is {values.dtype}, no floating-point numbers")
    if surely_usable(kind, values).item():  # for which a GPU is waited for once
        return None
    if not values.isfinite().all():
        return NOT_FINITE
    if not (_magnitudes(kind, values) <= _largest(values) / 8).all():
        return TOO_LARGE._replace(
            words=f"{TOO_LARGE.words} in {str(values.dtype).removeprefix('torch.')}"
        )
    if (_variances(kind, values) >= 0).all():
        return None
    return Fault("has a negative variance")


def surely_usable(kind: Kind, values: Tensor) -> Tensor:
    """Return whether one pass over values shows that they can be pooled, without a wait."""
    # below this norm all of them are finite, and small enough
    small: Tensor = torch.linalg.vector_norm(values) < _largest(values) ** 0.5 / 4
    return small.logical_and((_variances(kind, values) >= 0).all())


def _largest(values: Tensor) -> float:
    """Return the largest number of a dtype, but float64 has room for more than anybody may send."""
    return min(torch.finfo(values.dtype).max, LARGEST)


def _variances(kind: Kind, values: Tensor) -> Tensor:
    """Return the variances among values."""
    if kind == "variance":
        return values
    if kind == "statistics":
        return values[..., 1, :]
    return values[:0]


def _magnitudes(kind: Kind, values: Tensor) -> Tensor:
    """Return the numbers that must not be too large."""
    if kind == "mean":
        return values.square()
    if kind == "statistics":
        means, variances = values.unbind(-2)
        return means.square() + variances
    return values.abs()


def to_shares(weights: Sequence[float]) -> list[float]:
    """Return the weights p_i, which sum to one."""
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0:
        raise ValueError(f"weights must be finite, at least 0 and not all 0, got {list(weights)}")
    return [weight / total for weight in weights]


def _name(requests: Requests) -> str:
    return f"{requests.kind} of BN layer {requests.layer!r}"


def _form(requests: Requests) -> str:
    """Return shape and dtype of a client's row, as messages say them."""
    return f"{tuple(requests.tensor.shape[1:])} {requests.dtype}"


def _most_common(name: Callable[[Requests], str], parts: Iterable[Requests]) -> str:
    """Return the name that most clients' requests have."""
    votes = Counter[str]()
    for part in parts:
        votes[name(part)] += part.clients
    return votes.most_common(1)[0][0]
