"""Cells of a matrix in processes side by side, one process a cell."""

import logging
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, Self, TypeVar

from fedbn_flwr.experiments.engines import NEEDED
from fedbn_flwr.simulation.processes.worker import end_with_parent, preload


class Runnable(Protocol):
    """The piece of work of one process."""

    def run(self: Self) -> list[dict[str, Any]]:
        """Return the result."""

    def failed(self: Self, reason: str) -> list[dict[str, Any]]:
        """Return the result if the process ended without one."""


R = TypeVar("R", bound=Runnable)


def run_side_by_side(pieces: Sequence[R], workers: int) -> Iterator[tuple[R, list[dict[str, Any]]]]:
    """Run the pieces in so many processes at once; return each with its result, in the order in which they end."""
    preload(NEEDED)
    ahead, running = deque(pieces), dict[Connection, tuple[R, BaseProcess]]()
    try:
        while ahead or running:
            while ahead and len(running) < workers:
                piece = ahead.popleft()
                connection, process = _start(piece)
                running[connection] = piece, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                piece, process = running.pop(ready)
                yield piece, _result(ready, process, piece)
    finally:
        for connection, (_, process) in running.items():
            connection.close()
            process.kill()


def _start(piece: Runnable) -> tuple[Connection, BaseProcess]:
    # never a copy of this process, in which torch may have started threads
    context = get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, piece, logging.getLogger("flwr").level), daemon=False)
    process.start()
    there.close()
    return here, process


def _result(connection: Connection, process: BaseProcess, piece: Runnable) -> list[dict[str, Any]]:
    try:
        result: list[dict[str, Any]] = connection.recv()
    except EOFError:
        process.join()
        return piece.failed(f"its process ended with exit code {process.exitcode}")
    finally:
        connection.close()
    process.join()
    return result


def _work(connection: Connection, piece: Runnable, level: int) -> None:
    """Run one piece: what a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.getLogger("flwr").setLevel(level)
    connection.send(piece.run())
