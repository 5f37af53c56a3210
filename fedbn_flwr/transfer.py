"""Python objects from one process of this machine to another, with the numbers of large arrays beside the pickle."""

import io
import pickle
import socket
import struct
from typing import Any

from flwr.app import Array

#: for smaller arrays, calls of their own cost more than copies
_LARGE = 16 * 1024
_COUNTS = struct.Struct("<QQ")
_FRAME = struct.Struct("<Q?")


class Channel:
    """One end of a connection. What occurs several times in an item travels once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """For those who wait until there is something to receive."""
        return self._socket.fileno()

    def send(self, item: Any) -> None:
        """Send an item; OSError if the other end is gone."""
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(item)
        raw = [buffer.raw() for buffer in buffers]
        frames = b"".join(_FRAME.pack(view.nbytes, view.readonly) for view in raw)
        self._socket.sendall(_COUNTS.pack(len(raw), file.tell()) + frames)
        self._socket.sendall(file.getbuffer())
        for view in raw:
            self._socket.sendall(view)

    def receive(self) -> Any:
        """Wait for the next item; EOFError if the other end is gone."""
        count, size = _COUNTS.unpack(self._exactly(_COUNTS.size))
        frames = list(_FRAME.iter_unpack(self._exactly(count * _FRAME.size)))
        pickled = self._exactly(size)
        # a buffer that was read-only is handed to its array as it comes; others must be writable again
        buffers = [
            self._exactly(length) if readonly else bytearray(self._exactly(length)) for length, readonly in frames
        ]
        return pickle.loads(pickled, buffers=buffers)

    def close(self) -> None:
        """The other end sees an end of file."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            try:
                part = self._socket.recv(missing, socket.MSG_WAITALL)
            except ConnectionError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Pickler(pickle.Pickler):
    """Leaves the bytes of large arrays out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Array and len(obj.data) >= _LARGE:
            return Array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        return NotImplemented
