"""Nodes in several processes: the end of the grid, and the end of each worker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.layerwise import Answer, ExchangeError, OrderError, Requests, join, pool
from fedbn_flwr.transports.nodes_transport import LayerwiseGrid, NodesTransport, Participant

WorkerT = TypeVar("WorkerT")
#: asks workers to call a method of `WorkerShare` with a payload each, at the same time; returns what it returned
AskAll = Callable[[str, Mapping[WorkerT, Any]], dict[WorkerT, Any]]


@dataclass(frozen=True)
class Opened:
    """A worker's share of a step, at its first exchange."""

    #: in the order of the rows
    participants: Sequence[Participant]
    requests: Requests | None


class WorkersTransport(Generic[WorkerT]):
    """A `NodesTransport` whose nodes are shared out over workers, which are at their first exchange.

    From the first answer on that has the nodes' weights, a worker sends one row for all of its nodes, their pool: an
    exchange then costs the same with 10 and with 1,000 nodes of a worker. `close` makes the replies of all nodes of the
    workers' replies.
    """

    def __init__(
        self,
        opened: Mapping[WorkerT, Opened],
        ask_all: AskAll[WorkerT],
        close: Callable[[Mapping[WorkerT, list[Message | None]]], list[Message]],
        abandon: Callable[[Iterable[WorkerT]], None],
    ) -> None:
        self._ask_all, self._close, self._abandon = ask_all, close, abandon
        self._first = {worker: share.requests for worker, share in opened.items()}
        everyone = [participant for share in opened.values() for participant in share.participants]
        self._order = sorted(range(len(everyone)), key=everyone.__getitem__)
        self.participants = [everyone[position] for position in self._order]
        rows = iter(sorted(range(len(everyone)), key=self._order.__getitem__))
        #: by worker, the rows of its nodes
        self._rows = {worker: list(islice(rows, len(share.participants))) for worker, share in opened.items()}

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take the nodes of all workers to their next exchange."""
        shares = self._first if answer is None else self._ask_all("advance", self._answers(answer))
        # in the order of the workers, whichever answered first
        parts = [requests for worker in self._first if (requests := shares[worker]) is not None]
        if 0 < len(parts) < len(shares):
            raise OrderError(0, "is at a BN layer where others are at their end")
        if not parts or not parts[0].pools:
            return join(parts, self._order) if parts else None
        try:
            return join(parts)
        except ExchangeError as error:
            first = [rows[0] for rows in self._rows.values()]
            raise type(error)(first[error.client], error.reason) from None

    def _answers(self, answer: Answer) -> dict[WorkerT, Answer]:
        """Return the answer to each worker, with the weights of its own nodes."""
        if not answer.weights:
            return dict.fromkeys(self._rows, answer)
        return {
            worker: replace(answer, weights=tuple(answer.weights[row] for row in rows))
            for worker, rows in self._rows.items()
        }

    def replies(self) -> list[Message]:
        """Return the nodes' replies."""
        return self._close(self._ask_all("replies", dict.fromkeys(self._first)))

    def abandon(self) -> None:
        """End the step in all workers."""
        self._abandon(self._first)


class WorkerShare:
    """A worker's end: it takes the nodes of its grid through a step, as `WorkersTransport` asks.

    A subclass has a request `replies`, for the `step_replies` or what is made of them.
    """

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._transport: NodesTransport | None = None
        #: of the nodes in the step, where their requests are to be pooled
        self._weights: tuple[float, ...] = ()

    @property
    def grid(self) -> Grid:
        """The grid of the worker's nodes, once it is made."""
        if self._grid is None:
            raise RuntimeError("it has no nodes")
        return self._grid

    def open_step(self, messages: list[Message]) -> Opened | None:
        """Take this worker's nodes to the first exchange of a step; None if they cannot take it together."""
        self._transport = self.grid.open_step(messages) if isinstance(self.grid, LayerwiseGrid) else None
        self._weights = ()
        if self._transport is None:
            return None
        requests = self._next_requests(None)
        return Opened(self._transport.participants, requests)

    def advance(self, answer: Answer) -> Requests | None:
        """Take this worker's nodes to their next exchange; once it has their weights, as one row for all of them."""
        self._weights = answer.weights or self._weights
        return self._next_requests(answer)

    def _next_requests(self, answer: Answer | None) -> Requests | None:
        transport = self._opened
        try:
            requests = transport.advance(answer)
            if requests is None:
                return None
            if self._weights:
                requests = pool(requests, self._weights)
        except ExchangeError as error:
            raise RuntimeError(f"node {transport.participants[error.client].node}: {error.reason}") from None
        # where those of other workers are
        return replace(requests, tensor=requests.tensor.cpu())

    def step_replies(self) -> list[Message]:
        """Return the nodes' replies at the end of the step."""
        return self._opened.replies()

    def abandon(self, _: None) -> None:
        """Forget the step."""
        if self._transport is not None:
            self._transport.abandon()

    @property
    def _opened(self) -> NodesTransport:
        if self._transport is None:
            raise RuntimeError("it has no layer-wise step")
        return self._transport
