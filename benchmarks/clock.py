"""A process's side of the measurement: it runs rounds on command, and waits in between."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.memory import forget_peak, peak_megabytes
from fedbn_flwr.device import started

Notes = dict[str, Any]


class Enough(BaseException):
    """The driver wants no more rounds of this case: no error, so that no `except Exception` on the
    way catches it.
    """


class Clock:
    """Commands of the driver: `("run", n)` for n rounds, answered by their seconds, and
    `("end",)`.
    """

    def __init__(self, driver: Connection) -> None:
        self._driver = driver
        self._left, self._seconds, self._since = 0, list[float](), 0.0
        self._begun = False

    @contextmanager
    def case(self) -> Iterator[Notes]:
        """Around a case: tells the driver how it ended, and what was noted about it."""
        notes: Notes = {}
        self._left, self._seconds, self._begun = 0, [], False
        forget_peak()
        try:
            yield notes
            raise RuntimeError("the rounds came to an end by themselves")
        except Enough:
            self._tell("ended", {**notes, **_memory()})
        except Exception as error:
            self._tell("failed", " ".join(f"{type(error).__name__}: {error}".split()))

    def round_done(self) -> None:
        """A round has come to its end, or the first one could begin."""
        module = started()
        if module:
            module.synchronize()
        now = time.perf_counter()
        if not self._begun:
            self._begun = True
            self._tell("ready", None)
        elif self._left:
            self._left -= 1
            self._seconds.append(now - self._since)
            if not self._left:
                self._tell("ran", self._seconds)
        if not self._left:
            self._wait()
        self._since = time.perf_counter()

    def _tell(self, *words: Any) -> None:
        try:
            self._driver.send(words)
        except OSError:  # the driver has gone
            raise SystemExit from None

    def _wait(self) -> None:
        try:
            command, *details = self._driver.recv()
        except (EOFError, OSError):  # the driver has gone
            raise SystemExit from None
        if command == "end":
            raise Enough
        self._left, self._seconds = details[0], []


def _memory() -> Notes:
    notes: Notes = {"peak-memory-mb": round(peak_megabytes(), 1)}
    if hasattr(module := started(), "max_memory_allocated"):
        notes["peak-gpu-memory-mb"] = round(module.max_memory_allocated() / 2**20, 1)
        module.reset_peak_memory_stats()
    return notes
