"""The bounds on the suspended steps that a process holds."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from fedbn_flwr.layerwise import Exchange, Requests, StepCache, SuspendedStep
from tests.helpers.waiting import wait_until


def asking(exchange: Exchange) -> None:
    exchange(Requests("mean", "bn", torch.zeros(1, 1), (1,)))


def suspended() -> SuspendedStep[None]:
    step = SuspendedStep(asking, seed=0)
    step.advance()
    return step


def is_abandoned(step: SuspendedStep[None]) -> bool:
    try:
        step.advance()
    except RuntimeError:
        return True
    except ValueError:  # it waits for an answer
        return False
    raise AssertionError("a suspended step went on without an answer")


class Clock:
    """Time that passes when a test says so, and timers that go by it."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list["ClockTimer"]()

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.due <= self.now]:
            timer.cancel()
            timer.function()


class ClockTimer:
    """`threading.Timer` by such a clock."""

    clock: Clock

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.due, self.function, self.daemon = self.clock.now + seconds, function, False

    def start(self) -> None:
        self.clock.timers.append(self)

    def cancel(self) -> None:
        self.clock.timers.remove(self)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ClockTimer, "clock", clock, raising=False)
    monkeypatch.setattr("fedbn_flwr.layerwise.step_cache.monotonic", clock.monotonic)
    monkeypatch.setattr("fedbn_flwr.layerwise.step_cache.threading.Timer", ClockTimer)
    return clock


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    threads = threading.active_count()
    yield
    assert wait_until(lambda: threading.active_count() <= threads)


def test_what_is_taken_is_the_callers(clock: Clock) -> None:
    store, step = StepCache(time_to_live=0.5), suspended()
    store.keep(("run", 1, 7), step)
    assert store.take(("run", 1, 7)) is step
    assert store.take(("run", 1, 7)) is None
    assert len(store) == 0
    clock.advance(0.6)
    assert not is_abandoned(step), "its time to live is over, but it is in use"
    step.abandon()


def test_the_newest_is_abandoned_when_there_are_too_many() -> None:
    store, steps = StepCache(max_steps=2), [suspended() for _ in range(3)]
    for key, step in enumerate(steps):
        store.keep(key, step)
    assert [is_abandoned(step) for step in steps] == [False, False, True]
    assert store.take(2) is None
    store.clear()
    assert [is_abandoned(step) for step in steps] == [True, True, True]


def test_of_clients_that_take_turns_as_many_are_there_as_there_is_room_for() -> None:
    store = StepCache(max_steps=2)
    for _ in range(3):
        there = [store.take(key) for key in range(4)]
        for key, step in enumerate(there):
            store.keep(key, step or suspended())
    found = [store.take(key) for key in range(4)]
    assert [step is not None for step in found] == [True, True, False, False]
    for step in found:
        if step:
            step.abandon()
    store.clear()


def test_another_step_under_the_same_key_takes_the_place() -> None:
    store, old, new = StepCache(), suspended(), suspended()
    store.keep("key", old)
    store.keep("key", new)
    assert is_abandoned(old)
    assert store.take("key") is new
    new.abandon()
    store.clear()


def test_the_same_step_kept_again_stays() -> None:
    store, step = StepCache(), suspended()
    store.keep("key", step)
    store.keep("key", step)
    assert not is_abandoned(step)
    store.clear()


def test_each_step_that_nobody_takes_has_its_time_to_live(clock: Clock) -> None:
    store, first, second = StepCache(time_to_live=1), suspended(), suspended()
    store.keep(1, first)
    clock.advance(0.6)
    store.keep(2, second)
    assert [is_abandoned(first), is_abandoned(second)] == [False, False]
    clock.advance(0.5)
    assert [is_abandoned(first), is_abandoned(second)] == [True, False]
    clock.advance(0.5)
    assert is_abandoned(second)
    assert len(store) == 0
    assert not clock.timers


def test_a_step_that_nobody_takes_ends_without_anybody_asking() -> None:
    store, step = StepCache(time_to_live=0.01), suspended()
    store.keep(1, step)
    assert wait_until(lambda: is_abandoned(step))
    assert len(store) == 0


def test_room_can_be_made_for_more() -> None:
    store = StepCache(max_steps=1)
    store.make_room(3)
    store.make_room(2)
    for key in range(4):
        store.keep(key, SuspendedStep(lambda _: None, 0))
    assert len(store) == 3
    store.clear()


def test_a_cache_that_was_cleared_watches_again(clock: Clock) -> None:
    store, step = StepCache(time_to_live=1), suspended()
    store.keep(1, suspended())
    store.clear()
    assert not clock.timers
    store.keep(2, step)
    clock.advance(1.1)
    left = len(store)
    step.abandon()
    assert left == 0


def test_a_process_may_end_while_steps_are_kept(clock: Clock) -> None:
    store = StepCache()
    store.keep(1, suspended())
    daemons = [timer.daemon for timer in clock.timers]
    store.clear()
    assert daemons == [True]
