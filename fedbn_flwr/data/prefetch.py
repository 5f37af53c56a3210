"""Processes that decode mini-batches ahead of training."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any
from weakref import ref

import torch
import torch.multiprocessing  # lets processes hand tensors over in shared memory
from torch import Tensor

from fedbn_flwr.data.decoding import DecodeRequest

#: mini-batches that each worker decodes ahead
AHEAD = 2

Decoded = tuple[Tensor, Tensor | None]
#: whether streams are decoded by the process itself
_is_spared = False


def decode(requests: Iterable[DecodeRequest], workers: int) -> Iterator[Decoded]:
    """Decode mini-batches in their order, with so many workers or (0) in this process.

    All of a process's streams share its workers. A worker of an engine decodes its own, and so does
    a process that may have no processes of its own.
    """
    if not workers or _is_spared or multiprocessing.current_process().daemon:
        yield from (request.decode() for request in requests)
        return
    pool = _pool(os.getpid(), workers)
    waiting = deque[Future[Decoded]]()
    try:
        for request in requests:
            with without_script():  # the first ones start the workers
                waiting.append(pool.submit(request.decode))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:  # a worker has died: the next stream starts others
        _pool.cache_clear()
        raise
    finally:
        for future in waiting:
            future.cancel()


@contextmanager
def decoding_here() -> Iterator[None]:
    """Decode in this process, inside the block."""
    global _is_spared
    before = _is_spared
    _is_spared = True
    try:
        yield
    finally:
        _is_spared = before


@lru_cache(maxsize=1)
def _pool(process: int, workers: int) -> ProcessPoolExecutor:
    """Return workers that stay: to start them takes long, and a client's round has few batches."""
    pool = ProcessPoolExecutor(workers, initializer=_begin)
    # a process of multiprocessing waits at its end for its children, before concurrent.futures
    # would end them; queues close with priority 10, and the workers must hear of the end before
    Finalize(None, _shut_down, (ref(pool),), exitpriority=100)
    return pool


def _shut_down(pool: "ref[ProcessPoolExecutor]") -> None:
    """End a pool that is still there: one that another has replaced is not kept for this."""
    present = pool()
    if present is not None:
        present.shutdown(cancel_futures=True)


def _begin() -> None:
    serve_parent()
    torch.set_num_threads(1)


@contextmanager
def without_script() -> Iterator[None]:
    """Let a process that starts not run this one's script again, which so needs no `if __name__ ==
    "__main__":`.
    """
    main = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {
        name: main.pop(name) for name in ("__file__", "__spec__") if name in main
    }
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(kept)


def serve_parent() -> None:
    """Leave interrupts to the parent of this process, and end when it ends: a killed parent closes
    no connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
