"""The bounds on the suspended steps that a process holds."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fedbn_flwr.layerwise import Exchange, Request, StepStore, SuspendedStep


def asking(exchange: Exchange) -> None:
    exchange(Request("mean", "bn", torch.zeros(1), 1))


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    threads = threading.active_count()
    yield
    until(lambda: threading.active_count() <= threads)


def test_what_is_taken_is_the_callers() -> None:
    store, step = StepStore(time_to_live=0.5), suspended()
    store.keep(("run", 1, 7), step)
    assert store.take(("run", 1, 7)) is step
    assert store.take(("run", 1, 7)) is None
    assert len(store) == 0
    time.sleep(0.6)
    assert not is_abandoned(step), "its time to live is over, but it is in use"
    step.abandon()


def test_the_newest_is_abandoned_when_there_are_too_many() -> None:
    store, steps = StepStore(max_steps=2), [suspended() for _ in range(3)]
    for key, step in enumerate(steps):
        store.keep(key, step)
    assert [is_abandoned(step) for step in steps] == [False, False, True]
    assert store.take(2) is None
    store.clear()
    assert [is_abandoned(step) for step in steps] == [True, True, True]


def test_of_clients_that_take_turns_as_many_are_there_as_there_is_room_for() -> None:
    store = StepStore(max_steps=2)
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
    store, old, new = StepStore(), suspended(), suspended()
    store.keep("key", old)
    store.keep("key", new)
    assert is_abandoned(old)
    assert store.take("key") is new
    new.abandon()
    store.clear()


def test_the_same_step_kept_again_stays() -> None:
    store, step = StepStore(), suspended()
    store.keep("key", step)
    store.keep("key", step)
    assert not is_abandoned(step)
    store.clear()


def test_a_step_that_nobody_takes_ends_without_anybody_asking() -> None:
    store, first, second = StepStore(time_to_live=1), suspended(), suspended()
    store.keep(1, first)
    time.sleep(0.6)
    store.keep(2, second)
    until(lambda: is_abandoned(first))
    assert not is_abandoned(second)
    until(lambda: is_abandoned(second))
    assert len(store) == 0


def test_room_can_be_made_for_more() -> None:
    store = StepStore(max_steps=1)
    store.make_room(3)
    store.make_room(2)
    for key in range(4):
        store.keep(key, SuspendedStep(lambda _: None, 0))
    assert len(store) == 3
    store.clear()
