"""The driver's side of the measurement: engines in processes of their own, of which one works at a
time.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from statistics import median
from typing import Any, Self
from unittest.mock import patch

from benchmarks.cases import Case
from benchmarks.engines import ON_RAY, serve
from benchmarks.memory import family, lives
from benchmarks.orphans import end_with_this_process

#: imported once, by the process from which the others are forked
PRELOADED = "benchmarks.engines"
#: seconds that a process has to start a case, for an answer, to end by itself, and to end when it
#: is told to
STARTING, ANSWERING, ENDING, DYING = 120.0, 3600.0, 60.0, 5.0


class FailedError(RuntimeError):
    """An engine cannot do a case; the message says why."""


@dataclass(frozen=True)
class Effort:
    """The amount of measuring: a number of turns, or fewer where they would take more than
    `seconds`.
    """

    repetitions: int
    seconds: float
    most_rounds: int

    def rounds(self, seconds: float) -> int:
        """The rounds of a turn, if one takes so many seconds."""
        return _between(1, self.seconds / self.repetitions / seconds, self.most_rounds)

    def turns(self, seconds: float) -> int:
        """The turns, if a round takes so many seconds."""
        return _between(1, self.seconds / (seconds * self.rounds(seconds)), self.repetitions)


@dataclass
class Measured:
    """The seconds of one engine's rounds in one case, turn by turn."""

    engine: str
    threads: int
    first: float = 0.0
    turns: list[list[float]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def seconds(self) -> float:
        """The median of the turns' medians."""
        return median(self.medians)

    @property
    def medians(self) -> list[float]:
        """Return the median of each turn."""
        return [median(turn) for turn in self.turns]


class EngineProcess:
    """A process that plays one case after another with one engine."""

    def __init__(self, engine: str, threads: int, cases: Sequence[Case]) -> None:
        context = _forking()
        self.engine, self.threads = engine, threads
        self._end = "the process has ended"
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(engine, threads, cases, theirs))
        # the process from which others are forked has one thread: each is told its own number later
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Wait until the first round of a case could begin."""
        with self._awake():
            self._answer("ready", STARTING, f"did not start within {STARTING:g} s")

    def run(self, rounds: int) -> list[float]:
        """The seconds of so many rounds."""
        with self._awake():
            self._send("run", rounds)
            return list(self._answer("ran"))

    def end(self) -> dict[str, Any]:
        """End the case; what the process has to say about it."""
        with self._awake():
            self._send("end")
            return dict(self._answer("ended"))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """While others work, Ray's processes are stopped: they are busy even if there is nothing to
        do.
        """
        if self.engine not in ON_RAY:
            yield
            return
        assert self._process.pid
        _signal(family(self._process.pid), signal.SIGCONT)
        try:
            yield
        finally:
            _signal(family(self._process.pid), signal.SIGSTOP)

    def close(self) -> None:
        """End the process and all that it started."""
        self._pipe.close()
        assert self._process.pid
        members = family(self._process.pid)
        _signal(members, signal.SIGCONT)
        self._process.join(ENDING)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _gone(members):
                _signal(members, number)
        self._process.join(DYING)

    def _send(self, *command: Any) -> None:
        with suppress(OSError):  # it has ended; the answer will say so
            self._pipe.send(command)

    def _answer(
        self, expected: str, seconds: float = ANSWERING, late: str = f"no answer in {ANSWERING:g} s"
    ) -> Any:
        try:
            if not self._pipe.poll(seconds):
                self._give_up(late)
            kind, content = self._pipe.recv()
        except (EOFError, OSError):
            raise FailedError(self._end) from None
        if kind != expected:
            raise FailedError(str(content))
        return content

    def _give_up(self, why: str) -> None:
        """Kill the process, which would only disturb the others; later cases say why, too."""
        self._end = why
        assert self._process.pid
        _signal(family(self._process.pid), signal.SIGKILL)
        self._pipe.close()


def measure(case: Case, processes: Sequence[EngineProcess], effort: Effort) -> list[Measured]:
    """Time engines in turn; one that cannot go on drops out."""
    results = {each: Measured(each.engine, each.threads) for each in processes}
    for each in processes:
        with _dropping_out(results[each]):
            each.ready()
    for each in _remaining(results):
        with _dropping_out(results[each]):
            results[each].first, *_ = (each.run(1)[0] for _ in range(case.warm_up))
    _take_turns(results, effort)
    for each in _remaining(results):
        with _dropping_out(results[each]):
            results[each].notes = each.end()
    return list(results.values())


def _take_turns(results: dict[EngineProcess, Measured], effort: Effort) -> None:
    """The turns; the round by which they are planned counts as one if no turn has more rounds than
    that.
    """
    plans: dict[EngineProcess, float] = {}
    for each in _remaining(results):
        with _dropping_out(results[each]):
            seconds = each.run(1)
            plans[each] = seconds[0]
            results[each].turns = [seconds] if effort.rounds(seconds[0]) == 1 else []
    for _ in range(effort.repetitions):
        for each in [each for each in plans if not results[each].error]:
            if len(results[each].turns) < effort.turns(plans[each]):
                with _dropping_out(results[each]):
                    results[each].turns.append(each.run(effort.rounds(plans[each])))


@cache
def _forking() -> Any:
    end_with_this_process()
    context = get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


@contextmanager
def _dropping_out(result: Measured) -> Iterator[None]:
    try:
        yield
    except FailedError as error:
        result.error = str(error)


def _remaining(results: dict[EngineProcess, Measured]) -> list[EngineProcess]:
    return [each for each, result in results.items() if not result.error]


def _between(least: int, value: float, most: int) -> int:
    return max(least, min(int(value), most))


def _gone(members: Sequence[int]) -> bool:
    deadline = time.monotonic() + DYING
    while any(lives(member) for member in members):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _signal(members: Sequence[int], number: signal.Signals) -> None:
    for member in members:
        with suppress(OSError):
            os.kill(member, number)
