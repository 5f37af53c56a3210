"""A step that stops at each exchange until its answer comes, and the copies of models that waiting steps need."""

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import nn

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


_ONE_AT_A_TIME = threading.Lock()


class SuspendedStep(Generic[T]):
    """A step in a thread of its own, which runs only while `advance` waits for it.

    PyTorch cannot save a half-finished backward pass, so the thread is suspended. Another process can replay the
    step: a step of the same function and seed that gets the same answers stops at the same exchange, with the same
    bits. The step sees PyTorch's defaults, not the caller's thread-local modes (no_grad, autocast). It draws from a
    random stream of the given seed, not from the process's. A step that nobody holds any more ends where it is.
    """

    def __init__(self, step: Step[T], seed: int) -> None:
        self._randomness = OwnRandomness(seed)
        #: None in place of an answer ends the step
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Requests | Done[T] | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(step, self._answers, self._outcomes), daemon=True)
        # a step that is dropped without `abandon`, or is left when the process ends, must not wait for ever
        self._release = weakref.finalize(self, _release, self._answers, self._thread)

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
                self._answers.put(answer)
            outcome = self._outcomes.get()
        if not isinstance(outcome, Requests):
            self._release()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def abandon(self) -> None:
        """End the step where it is, and free its memory; nothing happens if the step has ended."""
        self._release()


# without the step, so that the step can be collected
def _run(
    step: Step[T], answers: SimpleQueue[Answer | None], outcomes: SimpleQueue[Requests | Done[T] | BaseException]
) -> None:
    def exchange(requests: Requests) -> Answer:
        outcomes.put(requests)
        answer = answers.get()
        if answer is None:
            answers.put(None)  # for the next request, if the step catches Abandoned all the same
            raise Abandoned
        return answer

    outcome: Done[T] | BaseException
    try:
        # otherwise backward passes on a GPU share one thread, and the first that waits would block all others
        with torch.autograd.set_multithreading_enabled(False):
            outcome = Done(step(exchange))
    except Abandoned:
        # without the traceback of Abandoned, which holds the activations
        outcome = RuntimeError("the step was abandoned")
    except BaseException as error:
        outcome = error
    outcomes.put(outcome)


def _release(answers: SimpleQueue[Answer | None], thread: threading.Thread) -> None:
    answers.put(None)
    # The garbage collector may call this in any thread, even in the step's own.
    if thread.ident not in (None, threading.get_ident()):
        thread.join(timeout=10)


class Replicas:
    """Copies of models, to be used again: to make one takes as long as several messages."""

    def __init__(self) -> None:
        self._free: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = weakref.WeakKeyDictionary()

    def take(self, model: nn.Module) -> nn.Module:
        """Return a copy that nobody else uses, with any values."""
        free = self._free.get(model)
        return free.pop() if free else copy.deepcopy(model)

    def give_back(self, model: nn.Module, replica: nn.Module) -> None:
        """Take back a copy that is not used any more, and has no hooks."""
        self._free.setdefault(model, []).append(replica)
