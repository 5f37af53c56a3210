"""A pipe for Python objects between processes, which sends large arrays without pickling their
numbers.
"""

import io
import os
import pickle
import select
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.state.flat import Buffers, FlatArrays, Layout
from fedbn_flwr.state.records import InMemoryArray, Members, view_array

#: bytes of the smallest array that is sent by itself: for smaller ones, a call costs more than a
#: copy
_LARGE = 16 * 1024
#: seconds that a process looks for the next item before it sleeps: from sleep it wakes late, with
#: its caches cold
_LOOKING = 0.004


class ObjectPipe:
    """One end of a connection. An object that occurs several times in an item is sent once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def send(self, item: Any) -> None:
        """Send an item. OSError if the other end is closed."""
        large: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes >= _LARGE:
                large.append(view)
            return view.nbytes < _LARGE

        pickled = io.BytesIO()
        _Pickler(pickled, protocol=5, buffer_callback=stays).dump(item)
        # one call where nothing is large: the other end wakes up once
        self._connection.send_bytes(
            pickle.dumps([view.nbytes for view in large]) + pickled.getbuffer()
        )
        for view in large:
            self._connection.send_bytes(view)

    def receive(self) -> Any:
        """Wait for the next item. EOFError if the other end is closed."""
        end = perf_counter() + _LOOKING
        while not self._arrivals.poll(0) and perf_counter() < end:
            os.sched_yield()
        try:
            received = io.BytesIO(self._connection.recv_bytes())
            buffers = [bytearray(size) for size in pickle.load(received)]
            for buffer in buffers:
                self._connection.recv_bytes_into(buffer)
        except OSError as error:
            raise EOFError from error
        return pickle.load(received, buffers=buffers)

    def close(self) -> None:
        """Close the connection; the other end then gets EOFError."""
        self._connection.close()


class _Pickler(pickle.Pickler):
    """Pickles arrays of this project as numpy arrays, which Flower's own would serialize one by
    one.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is InMemoryArray and "_value" in obj.__dict__:
            return InMemoryArray, (view_array(obj),)
        if type(obj) is Members:
            flat = obj.flat
            if flat is not None:
                return _members, (flat.layout, flat.buffers)
        if type(obj) is Tensor:
            return _tensor, _bytes_of(obj)
        return NotImplemented


def _members(layout: Layout, buffers: Buffers) -> Members:
    return Members(FlatArrays(layout, buffers))


def _bytes_of(values: Tensor) -> tuple[str, tuple[int, ...], bytearray]:
    """Return the bytes of a tensor, and what they are.

    numpy's own way of pickling is slower where a process comes from other work.
    """
    array = values.numpy(force=True)
    # a copy, as a `PickleBuffer` of a memoryview crashes Python 3.11 and 3.12 where both are
    # collected as garbage
    return array.dtype.str, array.shape, bytearray(array.data)


def _tensor(dtype: str, shape: tuple[int, ...], data: bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape))
