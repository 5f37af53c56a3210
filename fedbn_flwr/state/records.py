"""Flower's `Array` without serialization: bytes are made of it only when somebody asks for them."""

from collections.abc import Iterator, Mapping, MutableMapping
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.constant import SType
from numpy.typing import NDArray

from fedbn_flwr.state.flat import FlatArrays


class InMemoryArray(Array):
    """An `Array` that holds its numbers as they are.

    Flower serializes an array when it is made and parses it whenever it is read, which within one
    process is most of what a message costs. This one makes `data` when it is asked for. Outside
    of the process it is a plain `Array`: pickled it is one, and on a wire it has a plain one's
    content and id. `value` belongs to the array, and a reader without a copy (`view_array`) must
    leave it as it is.
    """

    def __init__(self, value: NDArray[Any]) -> None:
        # around `Array.__setattr__`, which is for changes
        fields = {
            "_value": value,
            "dtype": _name(value.dtype),
            "shape": value.shape,
            "stype": SType.NUMPY,
        }
        self.__dict__.update(fields)

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
        """Compare as Flower's arrays do: by descriptions and bytes."""
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
        if value is None:
            return super().numpy()
        return np.array(value, order="A")

    def deflate(self) -> bytes:
        """The content of a plain array: its first word is the name of a class that the receiver
        must know.
        """
        plain = Array(*_fields(self))
        plain.__dict__["_chunks"] = self.slice_array()
        return plain.deflate()


def make_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """A record of these very arrays: Flower's constructor would serialize each."""
    return _filled(dict(arrays))


def record_of(state: FlatArrays) -> ArrayRecord:
    """Make a record of a state, which shares its memory."""
    return _filled(Members(state))


def _filled(arrays: MutableMapping[str, Array]) -> ArrayRecord:
    record = ArrayRecord()
    if "_data" in record.__dict__:
        # past the checks of one entry at a time, which take longer than to copy a small array
        record.__dict__["_data"] = arrays
    else:  # a newer Flower keeps them elsewhere
        record.update(arrays)
    return record


def lend_record(record: ArrayRecord) -> ArrayRecord:
    """Make a record of the same arrays, whose entries can be changed without changing the first
    one's.
    """
    state = flat_of(record)
    if state is not None:
        return record_of(state)
    return _filled(dict(record.items()))


def flat_of(record: ArrayRecord) -> FlatArrays | None:
    """Return the flat state that a record was made of, unless it was changed; only to be read."""
    members = record.__dict__.get("_data")
    if isinstance(members, Members):
        return members.flat
    return None


class Members(MutableMapping[str, Array]):
    """The entries of a record of a flat state: an array is made when it is asked for."""

    def __init__(self, state: FlatArrays) -> None:
        self._state: FlatArrays | None = state
        self._made: dict[str, Array] = {}

    @property
    def flat(self) -> FlatArrays | None:
        """The state, while nobody has changed anything."""
        unchanged = all("_value" in array.__dict__ for array in self._made.values())
        return self._state if unchanged else None

    def __getitem__(self, name: str) -> Array:
        """The array; the same one, every time."""
        if name not in self._made:
            if self._state is None:
                raise KeyError(name)
            self._made[name] = InMemoryArray(self._state[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made if self._state is None else self._state)

    def __len__(self) -> int:
        return len(self._made if self._state is None else self._state)

    def __setitem__(self, name: str, array: Array) -> None:
        """Become a dictionary of arrays."""
        self._unfold()
        self._made[name] = array

    def __delitem__(self, name: str) -> None:
        """Become a dictionary of arrays."""
        self._unfold()
        del self._made[name]

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[str, Array]], tuple[dict[str, Array]]]:
        """Pickle as a dictionary of plain arrays."""
        return dict, (dict(self),)

    def copy(self) -> dict[str, Array]:
        """A dictionary of the same arrays."""
        return dict(self)

    def _unfold(self) -> None:
        self._made = dict(self)
        self._state = None


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the records of arrays, as a plain dictionary: `content.array_records` takes longer to
    make.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def view_array(array: Array) -> NDArray[Any]:
    """The numbers of an array, to be read only: others may hold the same memory; ValueError if
    there are none.
    """
    value: NDArray[Any] | None = array.__dict__.get("_value")
    return _parse(array) if value is None else value


def _parse(array: Array) -> NDArray[Any]:
    """Return a copy of the numbers in an array's bytes; an error if they are not as described.

    Flower's own `numpy` takes as much memory as the bytes ask for, and opens archives too.
    """
    file = BytesIO(array.data)
    np.lib.format.read_magic(file)
    shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
    sound = (np.dtype(array.dtype), array.shape, array.stype) == (
        dtype,
        shape,
        SType.NUMPY,
    ) and dtype.kind in "biufc"
    if not sound or len(array.data) != file.tell() + prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{len(array.data)} bytes of {dtype} {shape} are not {array.dtype} {array.shape}"
        )
    values = np.ndarray(
        shape, dtype, bytearray(array.data), file.tell(), order="F" if in_columns else "C"
    )
    return values.astype(dtype.newbyteorder("="), copy=False)


def _fields(array: Array) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, array.shape, array.stype, array.data


def _serialize(value: NDArray[Any]) -> bytes:
    buffer = BytesIO()
    np.save(buffer, value, allow_pickle=False)
    return buffer.getvalue()


@lru_cache
def _name(dtype: np.dtype[Any]) -> str:
    """Cached, because it takes as long as to copy a small array."""
    return str(dtype)


def payload_bytes(array: Array) -> int:
    """The bytes of an array's numbers: those after 10 bytes, and a header whose length the last two
    of these are.
    """
    value: NDArray[Any] | None = array.__dict__.get("_value")
    if value is None:
        return max(len(array.data) - 10 - int.from_bytes(array.data[8:10], "little"), 0)
    return value.nbytes
