"""Processes that die at a chosen moment of a run: between two messages, or in the middle of writing a checkpoint."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import torch

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.grid import WorkersGrid

Die = Callable[[], None]


class Death(BaseException):
    """Ends a run like a signal that cannot be caught: no handler of errors sees it."""


class Moments:
    """Counts the moments at which a run may die, and lets it die at one of them; 0 is never."""

    def __init__(self, fatal: int, die: Die) -> None:
        self.fatal, self.count, self._die = fatal, 0, die

    def before(self, function: Callable[..., Any], half: Callable[..., None] = lambda *_, **__: None) -> Any:
        """Return a function that may die before it does anything, or after `half` of what it does."""

        def tick(*arguments: Any, **options: Any) -> Any:
            for partly in (False, True):
                self.count += 1
                if self.count == self.fatal:
                    if partly:
                        half(*arguments, **options)
                    self._die()
            return function(*arguments, **options)

        return tick


@contextmanager
def dying(fatal: int, die: Die) -> Iterator[Moments]:
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


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with dying(int(sys.argv[1]), _kill) as moments:
        code = main(sys.argv[2:])
    print("moments:", moments.count, file=sys.stderr)
    sys.exit(code)
