"""A buffer for the replies of a round: in memory, and from a limit on in memory-mapped temporary files."""

from tempfile import TemporaryFile
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from numpy.typing import NDArray

from fedbn_flwr.state.flat import FlatArrays
from fedbn_flwr.state.records import array_records, flat_of, record_of

#: bytes of the replies to one push that stay in memory
MOST_HELD = 2**28
#: bytes of one temporary file, of which only what is written takes space on disk; a larger array gets its own file
FILE_SIZE = 2**28
#: every array in a file starts at a multiple of this, so that it can be viewed as any dtype
_ALIGNMENT = 64


class SpillBuffer:
    """Stores the replies to one push. A file in the system's temporary folder is deleted with the last reply in it."""

    def __init__(self) -> None:
        self._bytes = 0
        self._file: _MappedFile | None = None

    def store(self, reply: Message) -> Message:
        """Return the same reply, with its flat states in memory or on disk."""
        if reply.has_content():
            for name, record in array_records(reply.content).items():
                if (stored := self.store_record(record)) is not record:
                    reply.content[name] = stored
        return reply

    def store_record(self, record: ArrayRecord) -> ArrayRecord:
        """Return the same record, or an equal one whose buffers are on disk."""
        flat = flat_of(record)
        if flat is None or is_on_disk(flat):
            return record
        self._bytes += sum(part.nbytes for part in flat.buffers.values())
        if self._bytes <= MOST_HELD:
            return record
        return record_of(FlatArrays(flat.layout, {dtype: self._write(part) for dtype, part in flat.buffers.items()}))

    def _write(self, buffer: NDArray[Any]) -> NDArray[Any]:
        if self._file is None or self._file.room < buffer.nbytes:
            self._file = _MappedFile(max(FILE_SIZE, buffer.nbytes))
        return self._file.append(buffer)


def is_on_disk(flat: FlatArrays) -> bool:
    """Whether a state's buffers are in a memory-mapped file."""
    return any(_is_mapped(buffer) for buffer in flat.buffers.values())


def _is_mapped(buffer: NDArray[Any]) -> bool:
    while isinstance(buffer.base, np.ndarray):
        buffer = buffer.base
    return isinstance(buffer, np.memmap)


class _MappedFile:
    """A temporary file of a fixed size that is filled from its start. The last array in it keeps it alive.

    One mapping serves many arrays: a mapping takes a file descriptor, and processes have about a thousand.
    """

    def __init__(self, size: int) -> None:
        self._file = TemporaryFile(buffering=0)  # noqa: SIM115  # closed with the last reference to it
        self._file.truncate(size)
        self._mapped = np.memmap(self._file, np.uint8, "r+", shape=(size,))
        self._end = 0

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return len(self._mapped) - self._end

    def append(self, buffer: NDArray[Any]) -> NDArray[Any]:
        """Write a buffer, and return the same numbers as a view of the file."""
        start, end = self._end, self._end + buffer.nbytes
        # not through the mapping: where the disk is full, a write raises OSError and a mapping ends the process
        self._file.seek(start)
        unwritten = np.ascontiguousarray(buffer).view(np.uint8).data
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        self._end = min(-(-end // _ALIGNMENT) * _ALIGNMENT, len(self._mapped))
        return self._mapped[start:end].view(np.ndarray).view(buffer.dtype)
