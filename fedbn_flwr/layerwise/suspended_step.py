"""A step that stops at each exchange until its answer comes."""

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from fedbn_flwr.layerwise.exchange import Answer, Exchange, Requests
from fedbn_flwr.randomness import OwnRandomness

T = TypeVar("T")
#: a computation that reaches the other clients by calling its one argument
Step = Callable[[Exchange], T]


@dataclass(frozen=True)
class Done(Generic[T]):
    """The end of a step, and its result."""

    result: T


class Abandoned(BaseException):
    """Raised inside a step that is not resumed; no Exception, so that steps do not catch it."""


@dataclass(frozen=True)
class _Failed:
    error: BaseException


_ABANDON = object()
_ONE_AT_A_TIME = threading.Lock()


class SuspendedStep(Generic[T]):
    """A step in a thread of its own, which runs only while `advance` waits for it.

    PyTorch cannot save a half-finished backward pass, so the thread is suspended. Another process can replay the
    step: a step of the same function, seed and `log` (the answers so far) stops at the same exchange, with the
    same bits. The step sees PyTorch's defaults, not the caller's thread-local modes (no_grad, autocast). It draws
    from a random stream of the given seed, not from the process's.
    """

    def __init__(self, step: Step[T], seed: int, log: Iterable[Answer] = ()) -> None:
        self._randomness = OwnRandomness(seed)
        self._queues: _Queues[T] = _Queues()
        self._thread = threading.Thread(target=self._queues.run, args=(step, list(log)), daemon=True)
        # a step that is dropped without `abandon`, or is left when the process ends, must not wait for ever
        self._release = weakref.finalize(self, _release, self._queues, self._thread)

    def advance(self, answer: Answer | None = None) -> Requests | Done[T]:
        """Run to the next exchange or to the end; only the first call takes no answer.

        An exception of the step is raised here. One step runs at a time in a process.
        """
        if not self._release.alive:
            raise RuntimeError("the step is at its end, failed or abandoned")
        if (answer is None) != (self._thread.ident is None):
            raise ValueError("the first advance takes no answer, and every other one does")
        with _ONE_AT_A_TIME, self._randomness.drawing():
            if answer is None:
                self._thread.start()
            else:
                self._queues.answers.put(answer)
            outcome = self._queues.outcomes.get()
        if not isinstance(outcome, Requests):
            self._release()
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome

    def abandon(self) -> None:
        """End the step where it is, and free its memory; nothing happens if the step has ended."""
        self._release()


class _Queues(Generic[T]):
    """The queues between a step and its thread; without the step, so that the step can be collected."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[object] = SimpleQueue()
        self.outcomes: SimpleQueue[Requests | Done[T] | _Failed] = SimpleQueue()

    def run(self, step: Step[T], log: list[Answer]) -> None:
        earlier = iter(log)

        def exchange(requests: Requests) -> Answer:
            answer = next(earlier, None)
            return self._ask(requests) if answer is None else answer

        try:
            # otherwise backward passes on a GPU share one thread, and the first that waits would block all others
            with torch.autograd.set_multithreading_enabled(False):
                outcome: Done[T] | _Failed = Done(step(exchange))
        except Abandoned:
            # without the traceback of Abandoned, which holds the activations
            outcome = _Failed(RuntimeError("the step was abandoned"))
        except BaseException as error:
            outcome = _Failed(error)
        self.outcomes.put(outcome)

    def _ask(self, requests: Requests) -> Answer:
        self.outcomes.put(requests)
        answer = self.answers.get()
        if not isinstance(answer, Answer):
            self.answers.put(answer)  # for the next request, if the step catches Abandoned all the same
            raise Abandoned
        return answer


def _release(queues: _Queues[T], thread: threading.Thread) -> None:
    queues.answers.put(_ABANDON)
    # The garbage collector may call this in any thread, even in the step's own.
    if thread.ident not in (None, threading.get_ident()):
        thread.join(timeout=10)
