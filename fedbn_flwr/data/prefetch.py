"""Processes that decode mini-batches ahead of training: the workers of one `torch.utils.data.DataLoader`."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedbn_flwr.data.decoding import DecodeRequest, UnreadableImageError

#: mini-batches that each worker decodes ahead
AHEAD = 2

Decoded = tuple[Tensor, Tensor | None]


def decode(requests: Iterable[DecodeRequest], workers: int) -> Iterator[Decoded]:
    """Decode mini-batches in their order, with so many workers or (0) in this process.

    All of a process's splits share its workers, one stream at a time: a stream that begins while another is under way,
    as in suspended steps, is decoded in this process. So is every stream in a worker of an engine; there are as many of
    these as cores. (A worker process may have no processes of its own.)
    """
    if workers and _POOL.claim():
        try:
            yield from _POOL.decode(requests, workers)
        finally:
            _POOL.release()
    else:
        yield from (request.decode() for request in requests)


@contextmanager
def decoding_here() -> Iterator[None]:
    """Decode in this process, inside the block."""
    before, _POOL.is_spared = _POOL.is_spared, True
    try:
        yield
    finally:
        _POOL.is_spared = before


class _Decoder(Dataset[Decoded | UnreadableImageError]):
    """Takes whole requests for indices, so that workers need to know of no data set."""

    def __getitem__(self, request: DecodeRequest) -> Decoded | UnreadableImageError:
        try:
            return request.decode()
        except UnreadableImageError as error:  # a loader would put a traceback into its message
            return error


class _Pool:
    """The sampler of a loader whose workers stay: to start them takes long, and a client's round has few batches."""

    def __init__(self) -> None:
        self._in_use = Lock()
        #: whether streams are decoded without it
        self.is_spared = False
        self._present: Iterable[DecodeRequest] = ()
        self._loader: DataLoader[Any] | None = None
        self._key = 0, 0

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._present)

    def claim(self) -> bool:
        """Take the workers for one stream; False where this process has none, or another stream has them."""
        if self.is_spared or multiprocessing.current_process().daemon:
            return False
        return self._in_use.acquire(blocking=False)

    def release(self) -> None:
        """Leave the workers to the next stream."""
        self._in_use.release()

    def decode(self, requests: Iterable[DecodeRequest], workers: int) -> Iterator[Decoded]:
        """Decode one stream of mini-batches."""
        self._present = requests
        try:
            for decoded in self._open(workers):
                if isinstance(decoded, UnreadableImageError):
                    raise decoded
                yield decoded
        except RuntimeError:  # a worker has died: the next stream starts others
            self._loader = None
            raise
        finally:
            self._present = ()

    def _open(self, workers: int) -> "DataLoader[Any]":
        if self._loader is None or self._key != (os.getpid(), workers):
            self._key = os.getpid(), workers
            self._loader = DataLoader(
                _Decoder(),
                sampler=self,
                batch_size=None,
                num_workers=workers,
                collate_fn=_unchanged,
                prefetch_factor=AHEAD,
                persistent_workers=True,
                generator=torch.Generator(),  # else it draws from the global stream
            )
        return self._loader


def _unchanged(decoded: Any) -> Any:
    return decoded


_POOL = _Pool()
