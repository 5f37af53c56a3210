"""Replies that wait for the others of their round: in a file, where they are too many for the memory."""

from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from functools import lru_cache
from math import prod
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any
from weakref import WeakValueDictionary, ref

import numpy as np
from flwr.app import ArrayRecord, Message
from numpy.typing import NDArray

from fedbn_flwr.state.flat import FlatArrays, FlatState, Layout
from fedbn_flwr.state.records import array_records, flat_of, record_of

#: bytes of the replies to one push that stay in memory
MOST_HELD = 2**28


class SpillBuffer:
    """Takes the replies to one push. Its file, in the system's temporary folder, is gone with the last of them."""

    def __init__(self) -> None:
        #: what stays in memory, by its id
        self._held: WeakValueDictionary[int, NDArray[Any]] = WeakValueDictionary()
        self._bytes = 0
        self._file: Callable[[], _File | None] = lambda: None

    def store(self, reply: Message) -> Message:
        """The same reply, its flat states in memory or not."""
        if reply.has_content():
            for name, record in array_records(reply.content).items():
                if (kept := self.store_record(record)) is not record:
                    reply.content[name] = kept
        return reply

    def store_record(self, record: ArrayRecord) -> ArrayRecord:
        """The same record, or one whose numbers are in the file."""
        flat = flat_of(record)
        if flat is None or isinstance(flat, DiskArrays) or self._fits(flat):
            return record
        return record_of(self._on_disk(flat))

    def _fits(self, flat: FlatArrays) -> bool:
        """Whether it may stay in memory; of a stack, whose clients' runs are parts of one, all do or none."""
        owners = [owner for owner in map(_owner, flat.buffers.values()) if self._held.get(id(owner)) is not owner]
        size = sum(owner.nbytes for owner in owners)
        if self._bytes + size > MOST_HELD:
            return False
        self._held.update({id(owner): owner for owner in owners})
        self._bytes += size
        return True

    def _on_disk(self, flat: FlatArrays) -> "DiskArrays":
        file = self._file()
        if file is None:
            file = _File()
            self._file = ref(file)
        runs: Any = {dtype: DiskBuffer(file, file.append(run), dtype, len(run)) for dtype, run in flat.buffers.items()}
        return DiskArrays(flat.layout, runs)


def _owner(run: NDArray[Any]) -> NDArray[Any]:
    return run.base if isinstance(run.base, np.ndarray) else run


class _File:
    """Bytes one after another."""

    def __init__(self) -> None:
        # it is closed, and gone, with the last that is to be read from it
        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self._lock = Lock()

    def append(self, run: NDArray[Any]) -> int:
        """Where they are."""
        with self._lock:
            start = self._file.seek(0, 2)
            self._file.write(np.ascontiguousarray(run).data)
        return start

    def read(self, start: int, found: NDArray[Any]) -> NDArray[Any]:
        """Fill an array with some of them."""
        with self._lock:
            self._file.seek(start)
            self._file.readinto(found.data)  # type: ignore[attr-defined]  # which binary files have
        return found


class DiskBuffer:
    """A run of numbers in a file, of which what is asked for is read each time."""

    def __init__(self, file: _File, start: int, dtype: np.dtype[Any], length: int) -> None:
        self.dtype, self.nbytes = dtype, length * dtype.itemsize
        self._file, self._start, self._length = file, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Some of the numbers, which are the caller's."""
        start, end, _ = part.indices(self._length)
        found = np.empty(max(end - start, 0), self.dtype)
        return self._file.read(self._start + start * self.dtype.itemsize, found)

    def copy(self) -> NDArray[Any]:
        """All of them."""
        return self[:]

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, an array."""
        return np.asarray, (self[:],)


class DiskArrays(FlatArrays):
    """A state whose runs are in a file: each entry is read when it is asked for, and not kept."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        """An entry."""
        dtype, start, shape = _places(self.layout)[name]
        return self.buffers[dtype][start : start + prod(shape)].reshape(shape)

    def __contains__(self, name: object) -> bool:
        """Whether there is such an entry."""
        return name in _places(self.layout)

    def keys(self) -> KeysView[str]:
        """A mapping's, which ask for one entry after another; likewise the next two."""
        return KeysView(self)

    def values(self) -> ValuesView[NDArray[Any]]:
        """The entries."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, NDArray[Any]]:
        """Names and entries."""
        return ItemsView(self)

    @property
    def tensors(self) -> FlatState:  # it is not to be kept
        """As tensors, in memory."""
        return FlatState(self.layout, self.copy().buffers)


@lru_cache(maxsize=64)
def _places(layout: Layout) -> Mapping[str, tuple[np.dtype[Any], int, tuple[int, ...]]]:
    """By name, the run in which an entry is, where in it, and its shape."""
    found = {}
    for dtype, entries in layout.by_dtype.items():
        start = 0
        for name, _, shape in entries:
            found[name] = dtype, start, shape
            start += prod(shape)
    return found
