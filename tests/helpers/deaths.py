"""Processes that die at a chosen moment of a run: between two messages, or in the middle of writing
a checkpoint.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import torch

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid


class Death(BaseException):
    """Ends a run like a signal that cannot be caught: no handler of errors sees it."""


class Moments:
    """Counts the moments at which a run may die, and lets it die at one of them; 0 is never."""

    def __init__(self, fatal: int, die: Callable[[], Any]) -> None:
        self.fatal, self.count, self._die = fatal, 0, die

    def before(
        self, function: Callable[..., Any], half: Callable[..., None] = lambda *_, **__: None
    ) -> Any:
        """Return a function that may die before it does anything, or after `half` of what it
        does.
        """

        def tick(*arguments: Any, **options: Any) -> Any:
            for partly in (False, True):
                self.count += 1
                # two threads may count at once; and half of a call may fail
                if self.count >= self.fatal > 0:
                    try:
                        if partly:
                            half(*arguments, **options)
                    finally:
                        self._die()
            return function(*arguments, **options)

        return tick


def _die() -> None:
    raise Death


@contextmanager
def dying(fatal: int, die: Callable[[], Any] = _die) -> Iterator[Moments]:
    """Let whatever runs inside die at a moment, counted from 1."""
    moments = Moments(fatal, die)
    with (
        patch.object(InProcessGrid, "push_messages", moments.before(InProcessGrid.push_messages)),
        patch.object(WorkersGrid, "push_messages", moments.before(WorkersGrid.push_messages)),
        patch.object(Journal, "record", moments.before(Journal.record)),
        patch.object(torch, "save", moments.before(torch.save, _write_half)),
        patch.object(os, "fsync", moments.before(os.fsync)),
        patch.object(Path, "rename", moments.before(Path.rename)),
        patch.object(Path, "replace", moments.before(Path.replace)),
        patch.object(shutil, "rmtree", moments.before(shutil.rmtree, _remove_half)),
    ):
        yield moments


def _write_half(content: object, file: BinaryIO) -> None:
    file.write(b"PK" + bytes(1000))


def _remove_half(path: Path, **_: object) -> None:
    for file in sorted(path.glob("*.pt")):
        file.unlink()


def going_on(folder: Path, words: Sequence[str]) -> Sequence[str]:
    """Return the command that goes on with a run: after its checkpoint, or from the start if it has
    none yet.
    """
    return ["run", "--resume", str(folder)] if list(folder.rglob("checkpoint-[0-9]*")) else words


def run_in_process(fatal: int, words: Sequence[str]) -> tuple[int | None, int]:
    """Run a command in a process of its own, which is killed at a moment.

    Returns how the process ended, and how many moments there were if it was not killed.
    """
    start = get_context("forkserver")
    here, there = start.Pipe(duplex=False)
    process = start.Process(target=_run, args=(there, fatal, words))
    process.start()
    there.close()
    try:
        count = here.recv()
    except EOFError:
        count = 0
    process.join()
    return process.exitcode, count


def _run(connection: Connection, fatal: int, words: Sequence[str]) -> None:
    with dying(fatal, lambda: os.kill(os.getpid(), signal.SIGKILL)) as moments:
        code = main(words)
    connection.send(moments.count)
    sys.exit(code)
