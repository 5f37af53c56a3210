"""The server's loop over the exchanges of a layer-wise step, and clients in this process that stop
at each of them.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from fedbn_flwr.layerwise.exchange import (
    Answer,
    Combiner,
    Exchange,
    Observer,
    OrderError,
    Requests,
    combine,
    join_requests,
    respond,
)
from fedbn_flwr.randomness import OwnRandomness

ReplyT = TypeVar("ReplyT")
T = TypeVar("T")
#: returns the weights of the clients, in the order of the rows
Weigh = Callable[[], Sequence[float]]
#: a computation that reaches the other clients by calling its one argument
ExchangingStep = Callable[[Exchange], T]


class Exchanged(NamedTuple):
    """The bytes that an exchange carries."""

    #: of each client's request
    request: int
    #: of the answer, which goes to each client
    answer: int


class Transport(Protocol[ReplyT]):
    """What takes one layer-wise step of several clients from exchange to exchange, seen from the
    server.

    `Lockstep` is the transport of clients in this process. The transports of Flower's nodes are in
    `fedbn_flwr.transports`. A transport takes one step.
    """

    def take_at_once(self, weigh: Weigh) -> Sequence[Exchanged] | None:
        """Take the whole step where nobody needs to be asked, and return what exchanges would have
        carried; None where clients must be asked.
        """
        return None

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take every client to its next exchange, and return the requests of all; None where all
        are at their end.

        The first call takes no answer. Every later call brings the answer to the latest requests.
        Clients have the same rows every time. An exception says that the step cannot go on.
        """

    def replies(self) -> list[ReplyT]:
        """Return the clients' replies, after the end of the step; only now do clients remember what
        they did.
        """

    def abandon(self) -> None:
        """End the step where it is; no client remembers the step. Nothing happens after the end."""


def take_step(
    transport: Transport[ReplyT],
    weigh: Weigh,
    observe: Observer | None = None,
    combiner: Combiner = combine,
) -> list[ReplyT]:
    """Answer every exchange of a step for all clients at once, and return the clients' replies.

    This is the server in algorithms 2 and 3 of Wang et al. A request holds a client's mu_i and
    sigma_i^2 of one BN layer, from the first layer to the last, and then the gradients by them,
    from the last layer to the first. The answer is their sum_i p_i, equations (39) to (41). Where
    mean and variance come together, each variance is about the client's own mean, and `combine`
    adds the square of that mean's distance from the pooled one.

    `weigh` returns the weights p_i in the order of the rows; it is called once the clients have
    sent the first requests. Where the first answer tells workers the weights, each pools its rows,
    and `respond` adds pools. `observe` is called with every exchange. `combiner` may put a rule in
    the place of the weighted sums. If anything fails, the step is abandoned.
    """
    try:
        if combiner is combine and observe is None and transport.take_at_once(weigh) is not None:
            return transport.replies()
        requests = transport.advance()
        weights = [] if requests is None else weigh()
        while requests is not None:
            if observe is not None:
                observe(requests)
            requests = transport.advance(respond(requests, weights, combiner))
        return transport.replies()
    except Exception:
        transport.abandon()
        raise


@dataclass(frozen=True)
class Done(Generic[T]):
    """The end of a step, and its result."""

    result: T


class Abandoned(BaseException):
    """Raised inside a step that is not resumed; no Exception, so that steps do not catch it."""


_ONE_AT_A_TIME = threading.Lock()


class SuspendedStep(Generic[T]):
    """A step in a thread of its own, which runs only while `advance` waits for it.

    PyTorch cannot save a half-finished backward pass, so the thread is suspended. Another process
    can replay the step: a step of the same function and seed that gets the same answers stops at
    the same exchange, with the same bits. The step sees PyTorch's defaults, not the caller's
    thread-local modes (no_grad, autocast). It draws from a random stream of the given seed, not
    from the process's. A step that nobody holds any more ends where it is.
    """

    def __init__(self, step: ExchangingStep[T], seed: int) -> None:
        self._randomness = OwnRandomness(seed)
        #: None in place of an answer ends the step
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Requests | Done[T] | BaseException] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(step, self._answers, self._outcomes), daemon=True
        )
        # a step that is dropped without `abandon`, or is left when the process ends, must not wait
        # for ever
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
    step: ExchangingStep[T],
    answers: SimpleQueue[Answer | None],
    outcomes: SimpleQueue[Requests | Done[T] | BaseException],
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
        # otherwise backward passes on a GPU share one thread, and the first that waits would block
        # all others
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
        self._free: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = (
            weakref.WeakKeyDictionary()
        )

    def take(self, model: nn.Module) -> nn.Module:
        """Return a copy that nobody else uses, with any values."""
        free = self._free.get(model)
        return free.pop() if free else copy.deepcopy(model)

    def give_back(self, model: nn.Module, replica: nn.Module) -> None:
        """Take back a copy that is not used any more, and has no hooks."""
        self._free.setdefault(model, []).append(replica)


class Lockstep(Transport[ReplyT]):
    """The transport of clients in this process: stacks of clients, of which one at a time runs to
    its next exchange.

    A stack is a suspended step whose requests have a row for each of its clients, and whose result
    is a list of their replies. Row i of the joined batch is the client at position `order[i]` when
    the stacks are laid end to end.
    """

    def __init__(
        self, stacks: Sequence[SuspendedStep[list[ReplyT]]], order: Sequence[int] | None = None
    ) -> None:
        self._stacks = stacks
        self._order = order
        self._results: list[ReplyT] = []

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Take every stack to its next exchange."""
        outcomes = [stack.advance(answer) for stack in self._stacks]
        requests = [outcome for outcome in outcomes if isinstance(outcome, Requests)]
        done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
        if requests and done:
            sizes = [
                len(each.counts) if isinstance(each, Requests) else len(each.result)
                for each in outcomes
            ]
            position = sum(sizes[: outcomes.index(done[0])])
            if self._order is None:
                client = position
            else:
                client = self._order.index(position)
            raise OrderError(
                client, f"is at its end where others are at BN layer {requests[0].layer!r}"
            )
        if requests:
            return join_requests(requests, self._order)
        self._end([reply for outcome in done for reply in outcome.result])
        return None

    def _end(self, results: list[ReplyT]) -> None:
        """Keep the clients' results, which come stack by stack, in the order of the rows."""
        if self._order is not None:
            results = [results[position] for position in self._order]
        self._results = results

    def replies(self) -> list[ReplyT]:
        """Return the clients' results, in the order of the rows."""
        return self._results

    def abandon(self) -> None:
        """End every stack's step where it is."""
        for stack in self._stacks:
            stack.abandon()


def lockstep(
    steps: Sequence[ExchangingStep[ReplyT]],
    weights: Sequence[float],
    seeds: Sequence[int],
    observe: Observer | None = None,
) -> list[ReplyT]:
    """Run the steps of all clients, which meet at each exchange, and return their results.

    If one client fails, its error is raised and all others are abandoned.
    """
    stacks = [SuspendedStep(_alone(step), seed) for step, seed in zip(steps, seeds, strict=True)]
    return take_step(Lockstep(stacks), lambda: weights, observe)


def _alone(step: ExchangingStep[ReplyT]) -> ExchangingStep[list[ReplyT]]:
    return lambda exchange: [step(exchange)]
