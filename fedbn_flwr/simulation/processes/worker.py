"""A process that runs some of a federation's nodes, and the handle through which the grid's process
uses it.
"""

import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import (
    current_process,
    forkserver,
    get_context,
    resource_tracker,
    set_start_method,
)
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedbn_flwr.data import prefetch
from fedbn_flwr.simulation.processes.pipe import ObjectPipe
from fedbn_flwr.simulation.processes.service import Service, call

#: seconds that an idle process has to end by itself
_PATIENCE = 1.0


class WorkerError(RuntimeError):
    """A worker has failed; `unable` if it cannot do at all what it was asked for."""

    unable = True


class WorkerDiedError(RuntimeError):
    """A worker's process ended while it was needed; the message says how."""


class WorkerHandle(ABC):
    """The grid's side of one worker: it sends requests, and receives the answer to each, in their
    order.
    """

    #: the number of the present process, where it is one of this machine
    process_id = 0

    def __init__(self, index: int, threads: int) -> None:
        self.index = index
        self._threads = threads
        self._unanswered = 0
        self._pipe = self._start()

    def ask(self, name: str, payload: Any) -> None:
        """Send a request, and do not wait."""
        self._unanswered += 1
        # `answer` reports a process that has ended
        with suppress(ConnectionError):
            self._pipe.send((name, payload))

    def answer(self) -> Any:
        """Wait for the answer to the latest request.

        Earlier ones that nobody waited for must not have failed.
        """
        value = None
        while self._unanswered:
            try:
                failure, value = self._pipe.receive()
            except EOFError:
                raise self._died() from None
            self._unanswered = self._unanswered - 1
            self._alive = True
            if failure:
                error = WorkerError(f"worker {self.index}: {failure}")
                error.unable = value
                raise error
        return value

    def restart(self) -> bool:
        """Start a new process in place of the one that ended.

        Return False if there is one that starts already.
        """
        self._pipe.close()
        self._pipe = self._start()
        self._unanswered = 0
        return True

    def hang_up(self) -> None:
        """Close the connection, so that an idle process ends by itself."""
        self._pipe.close()

    @abstractmethod
    def end(self) -> None:
        """End the process, and wait until it has ended."""

    @abstractmethod
    def _start(self) -> "ObjectPipe | OwnShare":
        """Start the process; set `_alive` to False until it has answered."""

    @abstractmethod
    def _died(self) -> RuntimeError:
        """Say how the process ended: a `WorkerDiedError`, or a `WorkerError` if a new one would end
        in the same way.
        """


class OwnShare(WorkerHandle):
    """A worker in the grid's own process, and the way to it: it works while its answer is waited
    for.

    Two cores then have two processes, and not a third one that only waits for them. At every
    exchange of a layer-wise step, one process fewer has to be woken.
    """

    def end(self) -> None:
        """Do nothing: this process goes on."""

    def send(self, request: tuple[str, Any]) -> None:
        """Hold a request until its answer is waited for."""
        self._requests.append(request)

    def receive(self) -> tuple[str, Any]:
        """Answer the next request."""
        return call(self._service, *self._requests.pop(0))

    def close(self) -> None:
        """Forget the nodes."""
        self._service = Service()

    def _start(self) -> "OwnShare":
        self.process_id = os.getpid()
        self._service = Service()
        self._requests = list[tuple[str, Any]]()
        return self

    def _died(self) -> RuntimeError:
        return WorkerError("the grid's own process has ended")


class Worker(WorkerHandle):
    """A process of this machine, with the environment's variables and some of its own."""

    def __init__(
        self, index: int, threads: int, variables: Mapping[str, str] | None = None
    ) -> None:
        self._variables = {**os.environ, **(variables or {})}
        super().__init__(index, threads)

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.hang_up()
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()

    def _start(self) -> ObjectPipe:
        here, there = _processes().Pipe()
        self._alive = False
        level = logging.getLogger("flwr").level
        self._process = start_process(work, there, self._threads, level, variables=self._variables)
        self.process_id = self._process.pid or 0
        there.close()
        return ObjectPipe(here)

    def _died(self) -> RuntimeError:
        self._process.join()
        code = self._process.exitcode or 0
        if code < 0:
            how = f"was killed by signal {-code}"
        else:
            how = f"ended with exit code {code}"
        if code >= 0 and not self._alive:
            # a new one would end in the same way
            return WorkerError(
                f"worker {self.index}: its process {how} before it could do anything"
            )
        return WorkerDiedError(how)


def start_process(
    target: Callable[..., None],
    *arguments: Any,
    variables: Mapping[str, str] | None = None,
    daemon: bool = True,
) -> BaseProcess:
    """Start a process of this machine, with this one's variables or others.

    They are in time to choose a GPU: whatever it is forked from has not used any.
    """
    if variables is None:
        variables = dict(os.environ)
    process: BaseProcess = _processes().Process(
        target=_with_variables, args=(variables, target, *arguments), daemon=daemon
    )
    with prefetch.without_script():
        process.start()
    return process


def _with_variables(
    variables: Mapping[str, str], target: Callable[..., None], *arguments: Any
) -> None:
    """Do what a process is for: what it is forked from has the variables of an earlier time."""
    os.environ.clear()
    os.environ.update(variables)
    target(*arguments)


def preload(modules: Sequence[str]) -> None:
    """Start importing what workers need in the process that all of them are forked from.

    Neither that process nor the workers obey Ctrl-C, which a terminal sends to them all: this
    process tells them.
    """
    _processes().set_forkserver_preload(["fedbn_flwr.simulation.processes.worker", *modules])
    resource_tracker.ensure_running()  # which the other one starts, and thereby unblocks signals
    # a new process inherits what is blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # it would look for modules where a new Python does, and could find another version of ours
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    given = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name in variables:
            del os.environ[name]
        os.environ.update(given)


def _processes() -> Any:
    # never a copy of this process, in which torch may have started threads
    return get_context("forkserver")


def work(connection: Connection, threads: int, level: int) -> None:
    """Answer requests until the parent closes the connection, or ends: what a worker's process
    does.
    """
    # a user's loop may start processes that load data, as from any process
    current_process().daemon = False
    set_start_method(None, force=True)
    prefetch.serve_parent()
    serve_grid(connection, threads, level)
    # without the exit functions of libraries
    os._exit(0)


def serve_grid(connection: Connection, threads: int, level: int) -> None:
    """Answer requests until the other end closes the connection."""
    logging.getLogger("flwr").setLevel(level)
    if threads:
        torch.set_num_threads(threads)
    pipe = ObjectPipe(connection)
    service = Service()
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send(call(service, *pipe.receive()))
