"""A process that runs some of a federation's nodes, and the handle through which its parent uses it."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid

from fedbn_flwr.simulation.processes.channel import Channel, pack_requests, unpack_answer
from fedbn_flwr.wire.layerwise_grid import LayerwiseGrid, NodesStep, Participant

#: makes the grid of some partitions' nodes; it is pickled, and called in the worker
GridFactory = Callable[[Sequence[int]], Grid]

#: seconds that an idle process has to end by itself
_PATIENCE = 1.0


class WorkerError(RuntimeError):
    """A worker cannot do what it was asked for."""


class WorkerDiedError(RuntimeError):
    """A worker's process ended while it was needed; the message says how."""


class Worker:
    """The parent's side of one process: it sends requests, and receives the answer to each, in their order."""

    def __init__(self, index: int, threads: int) -> None:
        self.index, self._threads, self._unanswered = index, threads, 0
        self._start()

    def ask(self, name: str, payload: Any) -> None:
        """Send a request, and do not wait."""
        self._unanswered += 1
        # `answer` reports a process that has ended
        with suppress(ConnectionError):
            self._channel.send((name, payload))

    def answer(self) -> Any:
        """Wait for the answer to the latest request; earlier ones that nobody waited for must not have failed."""
        value = None
        while self._unanswered:
            try:
                failure, value = self._channel.receive()
            except EOFError:
                raise self._died() from None
            self._unanswered, self._alive = self._unanswered - 1, True
            if failure:
                raise WorkerError(f"worker {self.index}: {failure}")
        return value

    def call(self, name: str, payload: Any) -> Any:
        """Ask and wait."""
        self.ask(name, payload)
        return self.answer()

    def fileno(self) -> int:
        """Return the connection's descriptor, to wait for several workers at once."""
        return self._channel.fileno()

    @property
    def process_id(self) -> int:
        """The number of the present process."""
        return int(self._process.pid or 0)

    def restart(self) -> None:
        """Start a new process in place of the one that ended."""
        self._channel.close()
        self._start()

    def hang_up(self) -> None:
        """Close the connection, so that an idle process ends by itself."""
        self._channel.close()

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.hang_up()
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        here, there = _processes().Pipe()
        self._channel, self._unanswered, self._alive = Channel(here), 0, False
        level = logging.getLogger("flwr").level
        self._process = _processes().Process(target=work, args=(there, self._threads, level), daemon=True)
        self._process.start()
        there.close()

    def _died(self) -> RuntimeError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if code >= 0 and not self._alive:
            # a new one would end in the same way
            return WorkerError(f"worker {self.index}: its process {how} before it could do anything")
        return WorkerDiedError(how)


def preload(modules: Sequence[str]) -> None:
    """Start importing what workers need in the process that all of them are forked from."""
    _processes().set_forkserver_preload(["fedbn_flwr.simulation.processes.worker", *modules])
    forkserver.ensure_running()


def _processes() -> Any:
    # never a copy of this process, in which torch may have started threads
    return get_context("forkserver")


class Service:
    """The service of a worker: the methods named in `REQUESTS`, with one payload each."""

    REQUESTS: ClassVar[frozenset[str]] = frozenset(
        {"open", "deliver", "context", "save_states", "restore_states", "open_step", "advance", "replies", "abandon"}
    )

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._step: NodesStep | None = None

    def open(self, payload: tuple[GridFactory, Sequence[int]]) -> None:
        """Make the grid that later requests are about."""
        make_grid, partitions = payload
        self._grid = make_grid(partitions)

    def deliver(self, messages: list[Message]) -> list[Message]:
        """Return the answers, in the order of the messages."""
        replies = {reply.metadata.reply_to_message_id: reply for reply in self.grid.send_and_receive(messages)}
        return [replies[message.metadata.message_id] for message in messages]

    def context(self, node: int) -> Context:
        """Return a node's present context."""
        context: Context = self.grid.context(node)  # type: ignore[attr-defined]
        return context

    def save_states(self, folder: Path) -> None:
        """Write what this worker's nodes remember into a folder."""
        self.grid.save_states(folder)  # type: ignore[attr-defined]

    def restore_states(self, folder: Path) -> None:
        """Let this worker's nodes remember what is in a folder."""
        self.grid.restore_states(folder)  # type: ignore[attr-defined]

    def open_step(self, messages: list[Message]) -> Sequence[Participant] | None:
        """Open a layer-wise step of this worker's nodes; return the nodes, None if they cannot take it together."""
        self._step = self.grid.open_step(messages) if isinstance(self.grid, LayerwiseGrid) else None
        return None if self._step is None else self._step.participants

    def advance(self, answer: Any) -> Any:
        """Take this worker's nodes to their next exchange."""
        return pack_requests(self.step.advance(None if answer is None else unpack_answer(answer)))

    def replies(self, _: None) -> list[Message]:
        """Return the nodes' replies at the end of the step."""
        return self.step.replies()

    def abandon(self, _: None) -> None:
        """Forget the step."""
        if self._step is not None:
            self._step.abandon()

    @property
    def step(self) -> NodesStep:
        """The layer-wise step, once it is opened."""
        if self._step is None:
            raise RuntimeError("it has no layer-wise step")
        return self._step

    @property
    def grid(self) -> Grid:
        """The grid, once it is made."""
        if self._grid is None:
            raise RuntimeError("it has no nodes")
        return self._grid


def work(connection: Connection, threads: int, level: int) -> None:
    """Answer requests until the parent closes the connection, or ends: what a worker's process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.getLogger("flwr").setLevel(level)
    if threads:
        torch.set_num_threads(threads)
    channel, service = Channel(connection), Service()
    with suppress(EOFError, ConnectionError):
        while True:
            channel.send(_respond(service, *channel.receive()))
    # without the exit functions of libraries
    os._exit(0)


def _respond(service: Service, name: str, payload: Any) -> tuple[str, Any]:
    """Return the error, if any, and the answer."""
    if name not in service.REQUESTS:
        return f"unknown request {name!r}; known: {', '.join(sorted(service.REQUESTS))}", None
    try:
        return "", getattr(service, name)(payload)
    except Exception as error:
        logging.getLogger("flwr").debug("A worker failed", exc_info=error)
        return f"{type(error).__name__}: {error}", None


def end_with_parent() -> None:
    """End this process when its parent ends, also in the middle of work: a killed parent closes no connection."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
