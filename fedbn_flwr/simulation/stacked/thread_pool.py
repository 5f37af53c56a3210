"""Threads that clients train in, with several of torch's own."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from logging import ERROR
from queue import SimpleQueue
from typing import TypeVar

import torch
from flwr.common import log

T = TypeVar("T")
#: what a thread is told
_Work = Callable[[], object]


class Crew:
    """Does work in which each of torch's operations is spread over several processors.

    OpenMP has helpers for every thread that it serves, and keeps them for as long as that lives. A new thread's take a
    while to find processors of their own. And once all threads and helpers are more than the processors, helpers fall
    asleep after each operation, and to wake them up takes longer than they save. So the crew's threads are kept, as few
    as work, or wait in the middle of their work, at the same time; and the caller's own needs no helpers.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lanes: list[_Lane] = []
        # also called when nobody uses the crew any more, and at the interpreter's exit
        self.close = weakref.finalize(self, _end, self._lanes)

    def run(self, work: Callable[[], T]) -> T:
        """What the work returns, or raises."""
        outcome: Future[T] = Future()

        def keep_outcome() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        task = self.task(keep_outcome)
        task.start()
        try:
            task.join()
        except BaseException:  # an interrupted caller must not go on beside its own work
            task.join()
            raise
        return outcome.result()

    def task(self, work: _Work) -> "Task":
        """Work that begins later, and may then wait in between."""
        return Task(work, self.threads, self._free_lane)

    def _free_lane(self) -> "_Lane":
        for lane in self._lanes:
            if lane.free.is_set():
                return lane
        self._lanes.append(_Lane())
        return self._lanes[-1]


class Task:
    """To its owner, a thread that has this one thing to do."""

    def __init__(self, work: _Work, threads: int, find_lane: "Callable[[], _Lane]") -> None:
        self._work, self._threads, self._find_lane = work, threads, find_lane
        self._lane: _Lane | None = None
        self._done = threading.Event()

    @property
    def ident(self) -> int | None:
        """Of the thread, once it is found."""
        return self._lane.ident if self._lane else None

    def start(self) -> None:
        """Begin."""
        # the number is the process's for threads that are yet to come: another task may have changed it by then
        self._before = torch.get_num_threads()
        self._lane = self._find_lane()
        self._lane.free.clear()
        self._lane.work.put(self._run)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is done, and its thread can do something else."""
        self._done.wait(timeout)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._work()
        finally:
            del self._work
            torch.set_num_threads(self._before)
            assert self._lane
            self._lane.free.set()
            self._done.set()


class _Lane:
    """One thread."""

    def __init__(self) -> None:
        self.work: SimpleQueue[_Work | None] = SimpleQueue()
        self.free = threading.Event()
        self.free.set()
        thread = threading.Thread(target=_serve, args=(self.work,), daemon=True)
        thread.start()
        self.ident = thread.ident


def _serve(asked: "SimpleQueue[_Work | None]") -> None:
    while (work := asked.get()) is not None:
        try:
            work()
        except BaseException as error:
            log(ERROR, "A thread's work failed", exc_info=error)
        del work  # with all that it refers to


def _end(lanes: list[_Lane]) -> None:
    while lanes:
        lanes.pop().work.put(None)
