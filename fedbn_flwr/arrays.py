"""Flower's `Array` without serialization: bytes are made of it only when somebody asks for them."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from io import BytesIO
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.constant import SType
from numpy.typing import NDArray
from torch import Tensor

#: what a value is made of, and so how large it is when serialized: dtype, shape, whether in Fortran's order
Layout = tuple[np.dtype[Any], tuple[int, ...], bool]


class InMemoryArray(Array):
    """An `Array` that holds its numbers as they are.

    Flower serializes an array when it is made and parses it whenever it is read, which within one process is most of
    what a message costs. This one makes `data` when it is asked for. Whatever leaves the process is a plain `Array`:
    pickled it is one, and on a wire it has a plain one's content and id. `value` belongs to the array, and whoever
    reads it without a copy (`peek`) must leave it as it is.
    """

    def __init__(self, value: NDArray[Any]) -> None:
        # around `Array.__setattr__`, which is for changes
        self.__dict__.update(_value=value, dtype=_name(value.dtype), shape=value.shape, stype=SType.NUMPY)

    def __getattr__(self, name: str) -> Any:
        """Serialize, at the first use of `data`."""
        if name != "data" or "_value" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__["data"] = data = _serialize(self.__dict__["_value"])
        return data

    def __setattr__(self, name: str, value: Any) -> None:
        """Become what Flower's own array would be after the change."""
        if name in ("dtype", "shape", "stype", "data"):
            self.__dict__.setdefault("data", self.data)
            self.__dict__.pop("_value", None)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        """As between Flower's own: equal descriptions and bytes."""
        if not isinstance(other, Array):
            return NotImplemented
        return _fields(self) == _fields(other)

    __hash__ = None  # type: ignore[assignment]  # what can be changed has no hash, as in Flower

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        """A plain array, for another process."""
        return Array, _fields(self)

    def numpy(self) -> NDArray[Any]:
        """A copy of the numbers, as Flower's own array gives one."""
        value = self.__dict__.get("_value")
        return super().numpy() if value is None else np.array(value, order="A")

    def deflate(self) -> bytes:
        """The content of a plain array: its first word is the name of a class that the receiver must know."""
        plain = Array(*_fields(self))
        plain.__dict__["_chunks"] = self.slice_array()
        return plain.deflate()


def hold(value: NDArray[Any] | Tensor) -> InMemoryArray:
    """An array with a copy of these numbers, in the order in which `np.save` would keep them."""
    if isinstance(value, Tensor):
        value = value.numpy(force=True)
    return InMemoryArray(np.array(value, order="A"))


def make_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """A record of these very arrays: Flower's constructor would serialize each."""
    record = ArrayRecord()
    # past the checks of one entry at a time, which take three times as long as to copy a small array
    record.__dict__["_data"].update(arrays)
    return record


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """What `content.array_records` is, which takes its time to be kept up to date."""
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def peek(array: Array) -> NDArray[Any]:
    """The numbers of an array, to be read only: others may hold the same memory."""
    value: NDArray[Any] | None = array.__dict__.get("_value")
    return array.numpy() if value is None else value


def data_bytes(array: Array) -> int:
    """The length of `array.data`."""
    value = array.__dict__.get("_value")
    return len(array.data) if value is None else _data_bytes(_layout(value))


def distinct(arrays: Iterable[Array]) -> list[Array]:
    """One array of each content: by identity first, and by bytes only where these are there."""
    unlike = list({id(array): array for array in arrays}.values())
    if len(unlike) < 2:
        return unlike
    content = _content if all("_value" in array.__dict__ for array in unlike) else attrgetter("data")
    return list({content(array): array for array in unlike}.values())


def _fields(array: Array) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, array.shape, array.stype, array.data


def _content(array: Array) -> tuple[Layout, bytes]:
    """As telling as `data`, without its making."""
    value = array.__dict__["_value"]
    return _layout(value), value.tobytes(order="A")


def _layout(value: NDArray[Any]) -> Layout:
    return value.dtype, value.shape, value.flags.fnc


def _serialize(value: NDArray[Any]) -> bytes:
    buffer = BytesIO()
    np.save(buffer, value, allow_pickle=False)
    return buffer.getvalue()


@lru_cache(maxsize=4096)
def _data_bytes(layout: Layout) -> int:
    dtype, shape, fortran = layout
    header = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return len(header.getvalue()) + prod(shape) * dtype.itemsize


@lru_cache
def _name(dtype: np.dtype[Any]) -> str:
    """Cached, because it takes as long as to copy a small array."""
    return str(dtype)
