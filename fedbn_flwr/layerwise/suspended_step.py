"""A step that stops at each exchange until its answer comes."""

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from fedbn_flwr.layerwise.exchange import Answer, Exchange, Request
from fedbn_flwr.randomness import OwnRandomness

T = TypeVar("T")
#: Any computation that asks the other clients by calling its one argument.
Step = Callable[[Exchange], T]


@dataclass(frozen=True)
class Done(Generic[T]):
    """The step is at its end."""

    result: T


class Abandoned(BaseException):
    """Raised inside a step that nobody will resume; no Exception, so that steps do not catch it."""


@dataclass(frozen=True)
class _Failed:
    error: BaseException


_ABANDON = object()
_ONE_AT_A_TIME = threading.Lock()


class SuspendedStep(Generic[T]):
    """A step in a thread of its own, which runs only while `advance` waits for it.

    PyTorch cannot save a half-finished backward pass, so what is suspended is the thread. It can be had again
    in another process: a step made of the same function, seed and `log` (the answers so far) asks nothing
    that is in the log, and stops at the same exchange with the same bits. The step sees PyTorch's defaults,
    not the caller's thread-local modes (no_grad, autocast), and draws from a random stream of its own.
    """

    def __init__(self, step: Step[T], seed: int, log: Iterable[Answer] = ()) -> None:
        self._randomness = OwnRandomness(seed)
        self._channel: _Channel[T] = _Channel()
        self._thread = threading.Thread(target=self._channel.run, args=(step, list(log)), daemon=True)
        # A step that is dropped without `abandon`, or is there when the process ends, must not stay asleep.
        self._release = weakref.finalize(self, _release, self._channel, self._thread)

    def advance(self, answer: Answer | None = None) -> Request | Done[T]:
        """Run to the next exchange or to the end; the first call, and only that, takes no answer.

        What the step raises is raised here. One step runs at a time in a process.
        """
        if not self._release.alive:
            raise RuntimeError("the step is at its end, failed or abandoned")
        if (answer is None) != (self._thread.ident is None):
            raise ValueError("the first advance takes no answer, and every other one does")
        with _ONE_AT_A_TIME, self._randomness.drawing():
            if answer is None:
                self._thread.start()
            else:
                self._channel.answers.put(answer)
            outcome = self._channel.outcomes.get()
        if not isinstance(outcome, Request):
            self._release()
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome

    def abandon(self) -> None:
        """End the step where it is and free what it holds; nothing happens if it has ended."""
        self._release()


class _Channel(Generic[T]):
    """What a step's thread and its owner share: not the owner itself, so that it can be collected."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[object] = SimpleQueue()
        self.outcomes: SimpleQueue[Request | Done[T] | _Failed] = SimpleQueue()

    def run(self, step: Step[T], log: list[Answer]) -> None:
        known = iter(log)

        def exchange(request: Request) -> Answer:
            answer = next(known, None)
            return self._ask(request) if answer is None else answer

        try:
            # Else backward passes on a GPU share one thread, where the first to ask would block all others.
            with torch.autograd.set_multithreading_enabled(False):
                outcome: Done[T] | _Failed = Done(step(exchange))
        except Abandoned:
            # Without its traceback, which holds the activations.
            outcome = _Failed(RuntimeError("the step was abandoned"))
        except BaseException as error:
            outcome = _Failed(error)
        self.outcomes.put(outcome)

    def _ask(self, request: Request) -> Answer:
        self.outcomes.put(request)
        answer = self.answers.get()
        if not isinstance(answer, Answer):
            self.answers.put(answer)  # for the next time, should the step have caught it all the same
            raise Abandoned
        return answer


def _release(channel: _Channel[T], thread: threading.Thread) -> None:
    channel.answers.put(_ABANDON)
    # The garbage collector may call this in any thread, even in the step's own.
    if thread.ident not in (None, threading.get_ident()):
        thread.join(timeout=10)
