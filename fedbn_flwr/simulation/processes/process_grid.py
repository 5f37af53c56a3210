"""Flower's `Grid` over several processes, of this machine or of a cluster, each of which runs a
share of the nodes.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from logging import INFO, WARNING
from typing import Any, Self

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.device import count_cores
from fedbn_flwr.layerwise import Answer, Requests, Transport
from fedbn_flwr.layerwise.exchange import ExchangeError, OrderError, join_requests
from fedbn_flwr.plugins import import_function
from fedbn_flwr.server.grids import identify, is_simulated, wait_for_all
from fedbn_flwr.simulation.how_trained import HowTrained
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, LocalGrid, RunConfig
from fedbn_flwr.simulation.processes.service import GridFactory, Opened
from fedbn_flwr.simulation.processes.worker import (
    OwnShare,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerHandle,
    preload,
)
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid
from fedbn_flwr.transports import message_client


class WorkersGrid(LocalGrid):
    """Gives the replies of an `InProcessGrid` with the same nodes, from several processes at once.

    `make_grid` is given partitions, and makes the grid of their nodes inside a worker: it must be
    picklable, and the grid's node of partition p have the id `FIRST_NODE_ID + p`. A node stays with
    its worker, where its `Context` is. When a worker dies, its messages are answered by errors, and
    it is started again with empty contexts.

    With `here` the first of the workers is this process. It works while the grid waits for answers,
    with the threads that it has, and makes its grid when that is wanted first. If it dies, so does
    the run. The others are processes of this machine, or what `start` starts when it is called with
    a worker's number and threads.

    Where the workers' grids average replies (`average_by` of `StackedGrid`), there is a mean of
    each worker's nodes.

    Other workers start, import and make their grids while the caller goes on; the first messages
    wait for them. Close the grid, or use it as a context manager, and no process is left.
    """

    def __init__(
        self,
        make_grid: GridFactory,
        num_nodes: int,
        workers: int,
        *,
        threads: int = 1,
        here: bool = False,
        start: Callable[[int, int], WorkerHandle] = Worker,
    ) -> None:
        super().__init__()
        self._make_grid = make_grid
        self._num_nodes = num_nodes
        self._num_workers = max(min(workers, num_nodes), 1)
        self._workers: list[WorkerHandle] = []
        # also called when the grid is garbage-collected, and at the interpreter's exit
        self.close = weakref.finalize(self, _end, self._workers)
        for index in range(self._num_workers):
            make = OwnShare if here and index == 0 else start
            self._workers.append(make(index, threads))
        for worker in self._workers:
            self._open(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The numbers of the workers' present processes; 0 of those on other machines."""
        return [worker.process_id for worker in self._workers]

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes: they are always connected."""
        return [FIRST_NODE_ID + partition for partition in range(self._num_nodes)]

    def context(self, node: int) -> Context:
        """Return a node's context; of a node in another process, a copy."""
        worker = self._worker_of(node)
        context: Context = self._ask_all("context", {worker: node})[worker]
        return context

    def contexts(self) -> Iterator[Context]:
        """Iterate over copies of the contexts of nodes that remember something.

        The nodes of a worker that died remember nothing.
        """
        for worker in self._workers:
            nodes = self._try_all("remembering", {worker: None})[worker]
            if isinstance(nodes, WorkerDiedError):
                continue
            for node in nodes:
                context = self._try_all("context", {worker: node})[worker]
                if isinstance(context, Context):
                    yield context

    def remember(self, node: int, state: RecordDict) -> None:
        """Let a node remember this, and nothing else."""
        self._ask_all("remember", {self._worker_of(node): (node, state)})

    def how_trained(self) -> HowTrained:
        """Return how the workers that live have trained their clients."""
        answers = self._try_all("how_trained", dict.fromkeys(self._workers)).values()
        return HowTrained.together(each for each in answers if isinstance(each, HowTrained))

    def limit_stacks(self, most: int) -> None:
        """Train at most so many clients together; 0 sets no limit."""
        self._ask_all("limit_stacks", dict.fromkeys(self._workers, most))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages, to all workers at once, and keep the replies."""
        messages = list(messages)
        shares = self._shares(messages)
        answers = self._try_all(
            "deliver", {worker: [*share.values()] for worker, share in shares.items()}
        )
        for worker, answer in answers.items():
            if isinstance(answer, WorkerDiedError):
                reason = f"the process of worker {worker.index} {answer}"
                answers[worker] = [
                    _error_reply(message, reason) for message in shares[worker].values()
                ]
        self._replies |= {
            reply.metadata.reply_to_message_id: reply for reply in _collect(shares, answers)
        }
        return [message.metadata.message_id for message in messages]

    def open_step(self, messages: Sequence[Message]) -> "WorkersTransport | None":
        """Open the layer-wise step that these messages begin, if all of their nodes can take it
        without messages.

        None unless every worker has a `StackedGrid`, whose nodes all stack and fit into memory:
        then `MessageTransport` takes the step. Workers go to the first exchange at once. From there
        on, `take_step` asks `WorkersTransport`, which asks each worker's `Service`, which asks its
        `StackedTransport`, which wakes one thread a stack.
        """
        shares = self._shares(messages)
        try:
            opened = self._ask_all(
                "open_step", {worker: [*share.values()] for worker, share in shares.items()}
            )
        except (WorkerError, WorkerDiedError):
            self._abandon(shares)
            raise
        if None in opened.values():
            self._abandon(shares)
            return None
        return WorkersTransport(self, shares, opened)

    def _abandon(self, shares: Iterable[WorkerHandle]) -> None:
        """End a step in all workers.

        One that has died has no step any more, and a closed grid has no workers.
        """
        with suppress(WorkerError, WorkerDiedError):
            self._ask_all("abandon", dict.fromkeys(shares if self._workers else ()))

    def _shares(self, messages: Sequence[Message]) -> dict[WorkerHandle, dict[int, Message]]:
        """Return, for each worker, its nodes' messages by their places."""
        shares: dict[WorkerHandle, dict[int, Message]] = {}
        for place, message in enumerate(messages):
            shares.setdefault(self._worker_of(message.metadata.dst_node_id), {})[place] = message
        return shares

    def _ask_all(self, name: str, payloads: Mapping[WorkerHandle, Any]) -> dict[WorkerHandle, Any]:
        """Return the answers of workers that work at the same time; WorkerDiedError if one of them
        died.
        """
        answers = self._try_all(name, payloads)
        for death in answers.values():
            if isinstance(death, WorkerDiedError):
                raise death
        return answers

    def _try_all(self, name: str, payloads: Mapping[WorkerHandle, Any]) -> dict[WorkerHandle, Any]:
        """Return the answers of workers that work at the same time; of one that died and starts
        again, its error.
        """
        answers: dict[WorkerHandle, Any] = {}
        failures: list[WorkerError] = []
        try:
            for worker, payload in payloads.items():
                worker.ask(name, payload)
            # in the order of their numbers: this process comes first, and works meanwhile
            for worker in sorted(payloads, key=lambda worker: worker.index):
                try:
                    answers[worker] = worker.answer()
                except WorkerDiedError as death:
                    self._revive(worker, death)
                    answers[worker] = death
                except WorkerError as error:
                    failures.append(error)
        except BaseException:
            # some answers are still on their way, or half received
            self.close()
            raise
        if failures:
            raise failures[0]
        return answers

    def _revive(self, worker: WorkerHandle, death: WorkerDiedError) -> None:
        if worker.restart():
            nodes = len(self._partitions(worker.index))
            log(
                WARNING,
                "Worker %d %s: it is started again, its %d nodes without state",
                worker.index,
                death,
                nodes,
            )
        self._open(worker)

    def _open(self, worker: WorkerHandle) -> None:
        worker.ask("open", (self._make_grid, self._partitions(worker.index)))

    def _partitions(self, index: int) -> range:
        """Return a worker's partitions: every n-th, because neighbours may be alike in size, and
        all should be busy.
        """
        return range(index, self._num_nodes, self._num_workers)

    def _worker_of(self, node: int) -> WorkerHandle:
        """Return the worker that has a node; of a node that does not exist, one that will report
        it.
        """
        if not self._workers:
            raise WorkerError("the grid is closed")
        return self._workers[(node - FIRST_NODE_ID) % self._num_workers]


class WorkersTransport(Transport[Message]):
    """A `NodesTransport` whose nodes are shared out over workers, which are at their first
    exchange.

    From the first answer on that has the nodes' weights, a worker sends one row for all of its
    nodes, their pool: an exchange then costs the same with 10 and with 1,000 nodes of a worker.
    """

    def __init__(
        self,
        grid: WorkersGrid,
        shares: Mapping[WorkerHandle, Mapping[int, Message]],
        opened: Mapping[WorkerHandle, Opened],
    ) -> None:
        self._grid = grid
        self._shares = shares
        self._first = {worker: share.requests for worker, share in opened.items()}
        everyone = [participant for share in opened.values() for participant in share.participants]
        self._order = sorted(range(len(everyone)), key=everyone.__getitem__)
        self.participants = [everyone[position] for position in self._order]
        # the inverse of the order
        rows = iter(sorted(range(len(everyone)), key=self._order.__getitem__))
        #: by worker, the rows of its nodes
        self._rows = {
            worker: list(islice(rows, len(share.participants))) for worker, share in opened.items()
        }

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take the nodes of all workers to their next exchange."""
        if answer is None:
            shares = self._first
        else:
            shares = self._grid._ask_all("advance", self._answers(answer))
        # in the order of the workers, whichever answered first
        parts = [requests for worker in self._first if (requests := shares[worker]) is not None]
        if 0 < len(parts) < len(shares):
            raise OrderError(0, "is at a BN layer where others are at their end")
        if not parts or not parts[0].pools:
            return join_requests(parts, self._order) if parts else None
        try:
            return join_requests(parts)
        except ExchangeError as error:
            first = [rows[0] for rows in self._rows.values()]
            raise type(error)(first[error.client], error.reason) from None

    def _answers(self, answer: Answer) -> dict[WorkerHandle, Answer]:
        """Return the answer to each worker, with the weights of its own nodes."""
        if not answer.weights:
            return dict.fromkeys(self._rows, answer)
        answers = {}
        for worker, rows in self._rows.items():
            answers[worker] = replace(answer, weights=tuple(answer.weights[row] for row in rows))
        return answers

    def replies(self) -> list[Message]:
        """Return the nodes' replies."""
        return _collect(self._shares, self._grid._ask_all("replies", dict.fromkeys(self._first)))

    def abandon(self) -> None:
        """End the step in all workers."""
        self._grid._abandon(self._first)


def _collect(
    shares: Mapping[WorkerHandle, Mapping[int, Message]],
    answers: Mapping[WorkerHandle, Sequence[Message | None]],
) -> list[Message]:
    """Return replies in the order of their messages, which get the ids that the workers' grids gave
    to their copies.
    """
    replies: dict[int, Message] = {}
    for worker, share in shares.items():
        for (place, message), reply in zip(share.items(), answers[worker], strict=True):
            if reply is None:  # it is in the mean that answers another message
                identify(message)
            else:
                message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
                replies[place] = reply
    return [replies[place] for place in sorted(replies)]


def _error_reply(message: Message, reason: str) -> Message:
    identify(message)
    # CLIENT_APP_CRASHED is not in older Flowers
    reply = Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)
    identify(reply)
    return reply


def _end(workers: list[WorkerHandle]) -> None:
    """End all workers at once, then wait for each."""
    for worker in workers:
        worker.hang_up()
    while workers:
        workers.pop().end()


# ---- in any Flower project -----------------------------------------------------------------------


def in_workers(grid: Grid, context: Context, client_app: str, workers: int = 0) -> Grid:
    """Return a grid that trains the nodes of a simulation in worker processes; in a deployment, the
    grid itself.

    `client_app` names the ClientApp as pyproject.toml does, "package.module:app"; ValueError if
    there is none. Its nodes know their `partition-id` and `num-partitions`. An app of `client_app`
    trains in stacks, another's nodes one after another. Flower's own processes stay idle, so its
    `client-resources` do not apply.

    There are as many `workers` as processors by default. They end with the grid, or with the
    ServerApp's process.
    """
    if not is_simulated(grid):
        return grid
    # first: as soon as there are nodes, Flower loads the app, and would take what this thread has
    # half imported for it
    nodes = len(wait_for_all(grid))
    if not isinstance(import_function("ClientApp", client_app, ()), ClientApp):
        raise ValueError(f"ClientApp {client_app!r} is not a ClientApp")
    preload([__name__])
    make_grid = partial(_open_app, client_app, nodes, dict(context.run_config))
    inner = WorkersGrid(make_grid, nodes, workers or count_cores())
    inner.set_run(grid.run)
    log(
        INFO,
        "%d nodes train in worker processes %s, and client-resources do not apply",
        nodes,
        inner.process_ids,
    )
    return inner


def _open_app(
    client_app: str, nodes: int, run_config: RunConfig, partitions: Sequence[int]
) -> StackedGrid:
    # all of its nodes may wait in the middle of a layer-wise step
    message_client.allow_steps(len(partitions))
    return StackedGrid(import_function("ClientApp", client_app, ()), nodes, run_config, partitions)
