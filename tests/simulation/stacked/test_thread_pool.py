"""Threads that are kept, in which torch has several of its own."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from fedbn_flwr.layerwise import Answer, Done, Exchange, Request, SuspendedStep
from fedbn_flwr.simulation.stacked.thread_pool import Crew

THREADS = torch.get_num_threads() + 1


def soon(wanted: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not wanted() and time.monotonic() < deadline:
        time.sleep(0.01)
    return wanted()


def where() -> tuple[int, int]:
    return threading.get_ident(), torch.get_num_threads()


def test_work_is_done_in_one_thread_that_is_kept() -> None:
    before, crew = where(), Crew(THREADS)
    found = {crew.run(where) for _ in range(5)}
    assert len(found) == 1
    thread, threads = found.pop()
    assert thread != before[0]
    assert threads == THREADS
    assert where() == before


def test_what_work_raises_is_raised_and_the_next_goes_on() -> None:
    crew = Crew(THREADS)
    with pytest.raises(ZeroDivisionError):
        crew.run(lambda: 1 // 0)
    assert crew.run(lambda: 2) == 2


def test_work_that_waits_has_its_thread_and_other_work_another() -> None:
    crew, go = Crew(THREADS), threading.Event()
    waiting = crew.task(go.wait)
    assert waiting.ident is None
    waiting.start()
    assert crew.run(where)[0] != waiting.ident
    go.set()
    waiting.join()
    assert crew.run(where)[0] == waiting.ident


def test_of_two_that_overlap_nothing_remains() -> None:
    crew, go, before = Crew(THREADS), threading.Event(), torch.get_num_threads()
    waiting = crew.task(go.wait)
    waiting.start()
    assert crew.run(where)[1] == THREADS
    go.set()
    waiting.join()
    seen = list[int]()
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before]
    assert torch.get_num_threads() == before


def test_threads_end_with_the_crew() -> None:
    crew = Crew(THREADS)
    thread = crew.run(threading.current_thread)
    assert thread.is_alive()
    del crew
    gc.collect()
    assert soon(lambda: not thread.is_alive())


def test_what_work_refers_to_is_not_kept() -> None:
    class Thing:
        pass

    crew, thing = Crew(THREADS), Thing()
    gone = threading.Event()

    weakref.finalize(thing, gone.set)
    task = crew.task(partial(id, thing))
    task.start()
    task.join()
    del thing
    assert soon(gone.is_set)


def step(exchange: Exchange) -> tuple[int, float]:
    answer = exchange(Request("mean", "layer", torch.ones(1), 1))
    return torch.get_num_threads(), float(answer.tensor)


def test_steps_are_suspended_in_its_threads() -> None:
    crew = Crew(THREADS)
    first, second = (SuspendedStep(step, seed=0, make_thread=crew.task) for _ in range(2))
    for each in (first, second):
        assert isinstance(each.advance(), Request)
    assert first.advance(Answer(torch.ones(1), 1)) == Done((THREADS, 1.0))
    second.abandon()
    with pytest.raises(RuntimeError, match="abandoned"):
        second.advance(Answer(torch.ones(1), 1))
    third = SuspendedStep(step, seed=0, make_thread=crew.task)
    third.advance()
    third.abandon()
    # the third and the first had one thread, the second another
    assert len(crew._lanes) == 2
