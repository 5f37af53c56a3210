"""Flower's `Grid` over several processes of this machine, each of which runs a share of the nodes."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self, cast
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedbn_flwr.inprocess import FIRST_NODE_ID
from fedbn_flwr.layerwise import Answer, OrderError, Request
from fedbn_flwr.transfer import pack_answer, unpack_requests
from fedbn_flwr.worker import GridFactory, Worker, WorkerDiedError, WorkerError


class WorkersGrid(Grid):
    """Gives the replies of an `InProcessGrid` with the same nodes, from several processes at once.

    `make_grid` is given partitions, and makes the grid of their nodes inside a worker: it must be picklable, and the
    grid's node of partition p have the id `FIRST_NODE_ID + p`. A node stays with its worker, where its `Context` is.
    When a worker dies, its messages are answered by errors, and it is started anew with contexts that are empty.

    Workers start, import and make their grids while the caller goes on; the first messages wait for them. Close the
    grid, or use it as a context manager, and no process is left.
    """

    def __init__(self, make_grid: GridFactory, num_nodes: int, workers: int, *, threads: int = 1) -> None:
        self._make_grid, self._num_nodes = make_grid, num_nodes
        self._run = Run.create_empty(run_id=1)
        self._replies: dict[str, Message] = {}
        # Flower reads these when a message is created
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run.run_id, SUPERLINK_NODE_ID, 0
        self._num_workers = max(min(workers, num_nodes), 1)
        self._workers: list[Worker] = []
        # also called when nobody uses the grid any more, and at the interpreter's exit
        self.close = weakref.finalize(self, _end, self._workers)
        for index in range(self._num_workers):
            self._workers.append(Worker(index, threads))
            self._open(self._workers[index])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The workers' processes as they are now."""
        return [worker.process_id for worker in self._workers]

    def set_run(self, run: Run) -> None:
        """Take the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as Flower's older interface does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, always connected."""
        return [FIRST_NODE_ID + partition for partition in range(self._num_nodes)]

    def context(self, node: int) -> Context:
        """A copy of a node's context, to look into."""
        context: Context = self._worker_of(node).call("context", node)
        return context

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages, to all workers at once, and keep the replies."""
        messages = list(messages)
        shares: dict[Worker, list[Message]] = {}
        for message in messages:
            shares.setdefault(self._worker_of(message.metadata.dst_node_id), []).append(message)
        try:
            self._deliver(shares)
        except BaseException:
            # some answers are still on their way, or half received
            self.close()
            raise
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand the replies over, once."""
        return [self._replies.pop(item) for item in message_ids if item in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver and collect."""
        return self.pull_messages(self.push_messages(messages))

    def rehearse(self, messages: Sequence[Message]) -> list[Message]:
        """Have messages answered to find out how long it takes, while all workers are busy; nothing of it remains."""
        shares = {worker: [messages[place] for place in places] for worker, places in self._shares(messages).items()}
        return [reply for replies in self._ask_all("rehearse", shares).values() for reply in replies]

    def open_step(self, messages: Sequence[Message]) -> "SpreadStep | None":
        """The layer-wise step that these messages begin, if all of their nodes can take it without messages."""
        shares = self._shares(messages)
        found = self._ask_all("open_step", {worker: [messages[p] for p in places] for worker, places in shares.items()})
        if None in found.values():
            self._ask_all("abandon", dict.fromkeys(shares))
            return None
        speakers = {
            place: who for worker, places in shares.items() for place, who in zip(places, found[worker], strict=True)
        }
        return SpreadStep(self._ask_all, messages, shares, [speakers[place] for place in range(len(messages))])

    def _shares(self, messages: Sequence[Message]) -> dict[Worker, list[int]]:
        """For each worker the places of its nodes' messages."""
        shares: dict[Worker, list[int]] = {}
        for place, message in enumerate(messages):
            shares.setdefault(self._worker_of(message.metadata.dst_node_id), []).append(place)
        return shares

    def _ask_all(self, name: str, payloads: Mapping[Worker, Any]) -> dict[Worker, Any]:
        """The answers of workers that work at the same time; a dead one is started anew, and said to have died."""
        for worker, payload in payloads.items():
            worker.ask(name, payload)
        answers: dict[Worker, Any] = {}
        failures: list[RuntimeError] = []
        for worker in payloads:
            try:
                answers[worker] = worker.answer()
            except WorkerDiedError as death:
                self._revive(worker, death)
                failures.append(death)
            except WorkerError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def _deliver(self, shares: Mapping[Worker, Sequence[Message]]) -> None:
        for worker, messages in shares.items():
            worker.ask("deliver", messages)
        waiting = set(shares)
        while waiting:
            for worker in cast(list[Worker], wait(cast(list[int], list(waiting)))):
                waiting.remove(worker)
                for message, reply in zip(shares[worker], self._answers(worker, shares[worker]), strict=True):
                    # the worker's grid has given it its id
                    message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
                    self._replies[reply.metadata.reply_to_message_id] = reply

    def _answers(self, worker: Worker, messages: Sequence[Message]) -> list[Message]:
        """A worker's replies, or what is to be said for it."""
        try:
            replies: list[Message] = worker.answer()
        except WorkerDiedError as death:
            self._revive(worker, death)
            return [_error_reply(message, f"the process of worker {worker.index} {death}") for message in messages]
        return replies

    def _revive(self, worker: Worker, death: WorkerDiedError) -> None:
        nodes = len(self._partitions(worker.index))
        log(WARNING, "Worker %d %s: it starts anew, and its %d nodes without state", worker.index, death, nodes)
        worker.restart()
        self._open(worker)

    def _open(self, worker: Worker) -> None:
        worker.ask("open", (self._make_grid, self._partitions(worker.index)))

    def _partitions(self, index: int) -> range:
        """Those of a worker: in turn, because neighbours may be alike in size, and all of them are to be busy."""
        return range(index, self._num_nodes, self._num_workers)

    def _worker_of(self, node: int) -> Worker:
        """The worker that has a node; if there is no such node, any of them says so."""
        if not self._workers:
            raise WorkerError("the grid is closed")
        return self._workers[(node - FIRST_NODE_ID) % self._num_workers]


class SpreadStep:
    """A layer-wise step whose nodes are in several processes: to `Layerwise` strategies, what a `CohortStep` is."""

    def __init__(
        self,
        ask_all: Callable[[str, Mapping[Worker, Any]], dict[Worker, Any]],
        messages: Sequence[Message],
        shares: Mapping[Worker, Sequence[int]],
        speakers: Sequence[Any],
    ) -> None:
        self._ask_all, self._messages, self._shares, self.speakers = ask_all, messages, shares, speakers

    def advance(self, answer: Answer | None = None) -> list[Request]:
        """Go on with what all nodes together said; the first call takes no answer."""
        packed = None if answer is None else pack_answer(answer)
        said = {
            worker: unpack_requests(requests)
            for worker, requests in self._ask_all("advance", dict.fromkeys(self._shares, packed)).items()
        }
        if any(said.values()) and not all(said.values()):
            raise OrderError(0, "is at a BN layer where others are at their end")
        return self._in_order(said) if any(said.values()) else []

    def replies(self) -> list[Message]:
        """What the nodes reply at the end."""
        replies: list[Message] = self._in_order(self._ask_all("replies", dict.fromkeys(self._shares)))
        for message, reply in zip(self._messages, replies, strict=True):
            # the worker's grid has given it its id
            message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
        return replies

    def abandon(self) -> None:
        """Forget it."""
        with suppress(WorkerError, WorkerDiedError):
            self._ask_all("abandon", dict.fromkeys(self._shares))

    def _in_order(self, found: Mapping[Worker, Sequence[Any]]) -> list[Any]:
        placed = {
            place: item
            for worker, places in self._shares.items()
            for place, item in zip(places, found[worker], strict=True)
        }
        return [placed[place] for place in sorted(placed)]


def count_cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _error_reply(message: Message, reason: str) -> Message:
    message.metadata.__dict__["_message_id"] = str(uuid4())
    reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
    reply.metadata.__dict__["_message_id"] = str(uuid4())
    return reply


def _end(workers: list[Worker]) -> None:
    """All at once, each then waited for."""
    for worker in workers:
        worker.hang_up()
    while workers:
        workers.pop().end()
