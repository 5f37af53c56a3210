"""Suspending a step, going on, replaying it, abandoning it."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.layerwise import (
    Answer,
    Exchange,
    Requests,
    SuspendedStep,
    lockstep,
    shared_statistics,
)
from fedbn_flwr.layerwise.steps import Abandoned, Done
from tests.helpers.waiting import PATIENCE, wait_until


def network() -> nn.Module:
    """Two BN layers and two dropouts, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(),
        )


def training(scale: float = 1.0) -> Callable[[Exchange], list[Tensor]]:
    """A step that exchanges twice forward and twice backward, and results in gradients."""
    model = network()
    inputs = scale * torch.randn(5, 6, generator=torch.Generator().manual_seed(1))

    def step(exchange: Exchange) -> list[Tensor]:
        with shared_statistics(model, exchange):
            return list(torch.autograd.grad(model(inputs).square().sum(), list(model.parameters())))

    return step


def reply(request: Requests) -> Answer:
    """What clients with other data might have made of it; a function of the request alone."""
    return Answer(1.5 * request.tensor + 0.25, 3 * request.counts[0])


def finish(
    step: SuspendedStep[Any], outcome: Requests | Done[Any] | None = None
) -> tuple[list[Requests], Any]:
    """The requests on the way to the end, from the latest outcome on, and the result."""
    requests: list[Requests] = []
    outcome = outcome or step.advance()
    while isinstance(outcome, Requests):
        requests.append(outcome)
        outcome = step.advance(reply(outcome))
    return requests, outcome.result


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    for mine, other in zip(left, right, strict=True):
        assert torch.equal(mine, other)


def test_a_replay_from_any_log_has_the_same_bits() -> None:
    requests, result = finish(SuspendedStep(training(), seed=7))
    kinds = [(request.kind, request.layer) for request in requests]
    assert kinds == [
        ("statistics", "1"),
        ("statistics", "4"),
        ("gradients", "4"),
        ("gradients", "1"),
    ]
    log = [reply(request) for request in requests]
    for done in range(len(log) + 1):
        step = SuspendedStep(training(), seed=7)
        outcome = step.advance()
        for request, answer in zip(requests, log[:done], strict=False):
            assert isinstance(outcome, Requests)
            assert_same_bits([outcome.tensor], [request.tensor])
            outcome = step.advance(answer)
        later, again = finish(step, outcome)
        assert_same_bits([r.tensor for r in later], [r.tensor for r in requests[done:]])
        assert_same_bits(again, result)


def test_interleaved_steps_have_the_masks_that_they_have_alone() -> None:
    alone = [finish(SuspendedStep(training(scale), seed)) for scale, seed in ((1, 3), (2, 4))]
    one, other = SuspendedStep(training(1), 3), SuspendedStep(training(2), 4)
    outcomes: list[Any] = [one.advance(), other.advance()]
    while isinstance(outcomes[0], Requests):
        torch.rand(3)  # what else happens in the process
        outcomes = [
            step.advance(reply(out)) for step, out in zip((one, other), outcomes, strict=True)
        ]
    for (_, wanted), outcome in zip(alone, outcomes, strict=True):
        assert_same_bits(outcome.result, wanted)
    # not trivially: other masks give other gradients
    _, different = finish(SuspendedStep(training(1), seed=5))
    assert not torch.equal(different[0], alone[0][1][0])


def test_steps_of_several_threads_run_one_at_a_time() -> None:
    """Their random streams take the place of the process's own."""
    running, most = list[Exchange](), list[int]()

    def step(exchange: Exchange) -> None:
        running.append(exchange)
        time.sleep(0.02)
        most.append(len(running))
        running.pop()

    threads = [threading.Thread(target=SuspendedStep(step, seed).advance) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * len(threads)


def test_the_process_draws_as_if_there_were_no_steps() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wanted = torch.rand(4)
        torch.manual_seed(0)
        step = SuspendedStep(training(), seed=1)
        first = torch.rand(2)
        step.advance()
        second = torch.rand(2)
        step.abandon()
    assert torch.equal(torch.cat([first, second]), wanted)


def test_the_callers_modes_do_not_reach_the_step() -> None:
    with torch.no_grad():
        _, result = finish(SuspendedStep(training(), seed=0))
    assert len(result) == 8


def failing_forward(exchange: Exchange) -> None:
    exchange(Requests("mean", "bn", torch.zeros(1, 1), (1,)))
    raise KeyError("in the step")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("in the step")


def failing_backward(exchange: Exchange) -> None:
    exchange(Requests("mean", "bn", torch.zeros(1, 1), (1,)))
    Failing.apply(torch.zeros(1, requires_grad=True)).backward()


@pytest.mark.parametrize("failing", [failing_forward, failing_backward])
def test_what_the_step_raises_is_raised_by_advance(failing: Callable[[Exchange], None]) -> None:
    step = SuspendedStep(failing, seed=0)
    request = step.advance()
    assert isinstance(request, Requests)
    with pytest.raises(KeyError, match="in the step"):
        step.advance(reply(request))
    with pytest.raises(RuntimeError, match="at its end, failed or abandoned"):
        step.advance(reply(request))


def test_the_first_advance_takes_no_answer_and_all_others_do() -> None:
    SuspendedStep(training(), seed=0).abandon()  # one that was never started
    step = SuspendedStep(training(), seed=0)
    answer = Answer(torch.zeros(1), 1)
    with pytest.raises(ValueError, match="the first advance takes no answer"):
        step.advance(answer)
    step.advance()
    with pytest.raises(ValueError, match="the first advance takes no answer"):
        step.advance()
    step.abandon()
    with pytest.raises(RuntimeError, match="abandoned"):
        step.advance(answer)


def test_an_answer_of_another_shape_is_refused() -> None:
    step = SuspendedStep(training(), seed=0)
    step.advance()
    with pytest.raises(
        ValueError, match=r"BN layer '1': the answer to its statistics is \(3,\), not \(2, 8\)"
    ):
        step.advance(Answer(torch.zeros(3), 4))


def held(at: int) -> tuple[SuspendedStep[Any], weakref.ref[Tensor], nn.Module]:
    """A step that is suspended at its `at`-th exchange, and something that only it holds."""
    holds: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8))

    def step(exchange: Exchange) -> None:
        inputs = torch.randn(5, 6)
        with shared_statistics(model, exchange):
            outputs = model(inputs)
        holds.append(weakref.ref(outputs))
        outputs.square().sum().backward()

    suspended = SuspendedStep(step, seed=0)
    outcome = suspended.advance()
    for _ in range(at):
        assert isinstance(outcome, Requests)
        outcome = suspended.advance(reply(outcome))
    return suspended, holds[0] if holds else lambda: None, model  # type: ignore[return-value]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What a reference cycle holds stays in memory, and is seen."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("at", [0, 2, 3], ids=["forward", "backward", "later"])
def test_a_step_that_is_abandoned_or_held_by_nobody_lets_go_of_everything(
    at: int, is_dropped: bool
) -> None:
    threads = threading.active_count()
    step, activations, model = held(at)
    if is_dropped:
        del step
    else:
        step.abandon()
        step.abandon()  # the second time nothing happens
    assert wait_until(lambda: threading.active_count() <= threads)
    assert activations() is None
    assert all("forward" not in vars(layer) for layer in model.modules()), "the model is put back"


def test_a_step_that_catches_everything_but_base_exceptions_is_abandoned() -> None:
    ended = []

    def stubborn(exchange: Exchange) -> None:
        try:
            exchange(Requests("mean", "bn", torch.zeros(1, 1), (1,)))
        except Exception:
            ended.append("caught")
        except Abandoned:
            ended.append("abandoned")
            raise

    step = SuspendedStep(stubborn, seed=0)
    step.advance()
    step.abandon()
    assert ended == ["abandoned"]


def test_lockstep_ends_all_when_one_fails() -> None:
    threads = threading.active_count()

    def failing(exchange: Exchange) -> list[Tensor]:
        raise KeyError("one client")

    with pytest.raises(KeyError, match="one client"):
        lockstep([training(), training(), failing], [1, 1, 1], seeds=[0, 1, 2])
    assert wait_until(lambda: threading.active_count() <= threads)


def test_a_process_ends_while_steps_are_suspended() -> None:
    code = """
import torch
from torch import nn
from fedbn_flwr.layerwise import Answer, SuspendedStep, shared_statistics

model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

def step(exchange):
    with shared_statistics(model, exchange):
        model(torch.randn(3, 2)).sum().backward()

step = SuspendedStep(step, 0)
request = step.advance()
assert step.advance(Answer(request.tensor, 3)).kind == "gradients"
print("suspended in backward")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "suspended in backward\n", "")
