"""Python objects from one process of this machine to another, with the numbers of large arrays beside the pickle."""

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import Array

from fedbn_flwr.layerwise import Answer, Request
from fedbn_flwr.state.flat import Buffers, FlatArrays, Layout
from fedbn_flwr.state.records import InMemoryArray, Members, view_array

#: for smaller arrays, calls of their own cost more than copies
_LARGE = 16 * 1024
#: what goes into one call, of which systems take 1,024 at least
_MOST_PARTS = 1000
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
        beside: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes >= _LARGE:
                beside.append(view)
            return view.nbytes < _LARGE

        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=stays).dump(item)
        frames = b"".join(_FRAME.pack(view.nbytes, view.readonly) for view in beside)
        self._send([memoryview(_COUNTS.pack(len(beside), file.tell()) + frames), file.getbuffer(), *beside])

    def _send(self, parts: Sequence[memoryview]) -> None:
        """In as few calls as may be: after each one the other end may wake up, to find that there is not enough yet."""
        for start in range(0, len(parts), _MOST_PARTS):
            some = [part.cast("B") for part in parts[start : start + _MOST_PARTS] if part.nbytes]
            sent = self._socket.sendmsg(some)
            for part in some:
                if sent < part.nbytes:
                    self._socket.sendall(part[sent:])
                sent = max(sent - part.nbytes, 0)

    def receive(self) -> Any:
        """Wait for the next item; EOFError if the other end is gone."""
        try:
            return self._receive()
        except ConnectionError as error:
            raise EOFError from error

    def _receive(self) -> Any:
        count, size = _COUNTS.unpack(self._exactly(_COUNTS.size))
        frames = list(_FRAME.iter_unpack(self._exactly(count * _FRAME.size)))
        pickled = self._exactly(size)
        # bytes are bytes again, and numbers can be changed
        buffers = [self._exactly(length) if readonly else self._writable(length) for length, readonly in frames]
        return pickle.loads(pickled, buffers=buffers)

    def close(self) -> None:
        """The other end sees an end of file."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = self._socket.recv(missing, socket.MSG_WAITALL)
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _writable(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            received = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError
            view = view[received:]
        return buffer


class _Pickler(pickle.Pickler):
    """Leaves the bytes of large arrays out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is InMemoryArray and "_value" in obj.__dict__:
            return InMemoryArray, (view_array(obj),)
        if type(obj) is Members and (flat := obj.flat) is not None:
            return _members, (flat.layout, flat.buffers)
        if type(obj) is Array and len(obj.data) >= _LARGE:
            return Array, (obj.dtype, obj.shape, obj.stype, pickle.PickleBuffer(obj.data))
        return NotImplemented


def _members(layout: Layout, buffers: Buffers) -> Members:
    return Members(FlatArrays(layout, buffers))


def pack_requests(requests: Sequence[Request]) -> Any:
    """What several clients say of one layer, in one array; a pickled tensor takes as long as an exchange."""
    if not requests:
        return None
    first, counts = requests[0], [request.count for request in requests]
    return (
        type(first),
        first.kind,
        first.layer,
        counts,
        torch.stack([request.tensor for request in requests]).numpy(force=True),
    )


def unpack_requests(packed: Any) -> list[Request]:
    """For each client what it says."""
    if packed is None:
        return []
    make, kind, layer, counts, rows = packed
    return [make(kind, layer, tensor, count) for tensor, count in zip(torch.from_numpy(rows), counts, strict=True)]


def pack_answer(answer: Answer) -> Any:
    """The answer to all of them."""
    return answer.tensor.numpy(force=True), answer.count


def unpack_answer(packed: Any) -> Answer:
    """The same, in another process."""
    values, count = packed
    return Answer(torch.from_numpy(values), count)
