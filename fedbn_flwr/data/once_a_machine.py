"""What several processes of a machine load alike, once in its memory."""

import hashlib
import io
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from mmap import ACCESS_COPY, mmap
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: bytes of the smallest tensor that is shared: smaller ones are copied
_LARGE = 2**16
#: tensors begin at multiples of this number of bytes
_ALIGNED = 64


def once_a_machine(name: str, make: Callable[[], T]) -> T:
    """Return what `make` returns in the first process of this machine that asks for the name.

    The others wait for it, and get the object with its large tensors in the same memory. What they write there they
    have for themselves. In the first process these tensors move into that memory, in place. The memory is there until
    the last process ends. If the first one ends, the next that asks makes the object again. `name` should be hard to
    guess; processes of other users get nothing. On systems without Linux's abstract sockets, and for objects that
    cannot be pickled or have tensors elsewhere (as images that stay in files), every process makes its own.
    """
    if not hasattr(os, "memfd_create"):
        return make()
    address = b"\0fedbn-flwr-" + hashlib.sha256(name.encode()).hexdigest().encode()
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(address)
        except OSError:
            server.close()
            with suppress(ConnectionError, EOFError):
                file = _receive(address)
                return make() if file is None else _read(file)
            continue
        try:
            server.listen(128)
            made = make()
            file = _write(made)
        except BaseException:
            server.close()
            raise
        threading.Thread(target=_serve, args=(server, file), daemon=True).start()
        return made


def _receive(address: bytes) -> int | None:
    """Wait for the file of the process at this address; None if it has none."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        received, files, _, _ = socket.recv_fds(client, 1, 1)
    if not received:
        raise EOFError
    return files[0] if files else None


def _serve(server: socket.socket, file: int | None) -> None:
    """Give the file to every process of the same user that connects."""
    while True:
        with server.accept()[0] as client, suppress(OSError):
            _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            socket.send_fds(client, [b"."], [file] if file is not None and user == os.getuid() else [])


def _write(made: Any) -> int | None:
    """Return a file in memory with an object, and let its large tensors be there; None if it cannot be pickled."""
    tensors: dict[int, tuple[Tensor, int]] = {}
    end = _ALIGNED

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            nonlocal end
            if type(item) is not Tensor or item.nbytes < _LARGE:
                return None
            if item.device.type != "cpu":
                raise ValueError("what is not in memory cannot be shared")
            if id(item) not in tensors:
                tensors[id(item)] = item, end
                end += -(-item.nbytes // _ALIGNED) * _ALIGNED
            return tensors[id(item)][1], item.dtype, tuple(item.shape)

    pickled = io.BytesIO()
    try:
        Pickler(pickled, protocol=5).dump(made)
    except Exception:
        return None
    file = os.memfd_create("fedbn-flwr")
    os.ftruncate(file, end + len(pickled.getbuffer()))
    os.pwrite(file, struct.pack("q", end), 0)
    os.pwrite(file, pickled.getbuffer(), end)
    with mmap(file, 0) as memory:
        for tensor, start in tensors.values():
            memory[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    memory = mmap(file, 0, access=ACCESS_COPY)
    for tensor, start in tensors.values():
        tensor.set_(_tensor_in(memory, start, tensor.dtype, tuple(tensor.shape)))  # type: ignore[call-overload]
    return file


def _read(file: int) -> Any:
    """Return the object in a file that `_write` returned, and close the file."""
    memory = mmap(file, 0, access=ACCESS_COPY)
    os.close(file)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: Any) -> Tensor:
            return _tensor_in(memory, *place)

    (end,) = struct.unpack_from("q", memory)
    return Unpickler(io.BytesIO(memory[end:])).load()


def _tensor_in(memory: mmap, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=start).view(shape)
