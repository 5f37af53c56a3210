"""Torch's threads for a piece of work."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def with_threads(number: int, work: Callable[[], T]) -> T:
    """What work returns that is done with so many of torch's threads; 0: as many as there are.

    OpenMP keeps helpers for every thread that it served, for as long as that lives. Once all threads and their helpers
    are more than the processors, each operation has to wake its helpers up, which takes longer than they save. So this
    is for a thread that ends with the work; `apart` has one of its own.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        return work()
    finally:
        torch.set_num_threads(before)


def apart(number: int, work: Callable[[], T]) -> T:
    """The same in a thread of its own; with 0 threads, here."""
    if not number:
        return work()
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(with_threads, number, work).result()
