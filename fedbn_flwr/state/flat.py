"""States as one buffer for each dtype: an operation on a whole state is then one call, not
hundreds.

This makes packing, averaging and reading several times faster (docs/benchmarks.md, "Choices in the
code").
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.device import pins

#: name, dtype and shape of one array
Entry = tuple[str, np.dtype[Any], tuple[int, ...]]
#: one 1-D array for each dtype
Buffers = dict[np.dtype[Any], NDArray[Any]]

#: how many numbers are looked at at a time: as many as stay in a processor's cache
_PORTION = 2**17
CPU = torch.device("cpu")

V = TypeVar("V")


class Layout:
    """Names, dtypes and shapes of a state.

    States of equal entries share one object, while `Layout.of` remembers it.
    """

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        #: the entries of each buffer, in the state's order
        self.by_dtype: dict[np.dtype[Any], list[Entry]] = {}
        for entry in entries:
            self.by_dtype.setdefault(entry[1], []).append(entry)
        self.all_entries = frozenset(entries)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(entries: tuple[Entry, ...]) -> "Layout":
        """Return the layout of these entries, the same object each time."""
        return Layout(entries)

    def __reduce__(self) -> tuple[Any, tuple[tuple[Entry, ...]]]:
        """Pickle by entries: another process gets its own shared object."""
        return Layout.of, (self.entries,)


class Flat(Mapping[str, V], Generic[V]):
    """A state whose entries are views of its buffers.

    Do not write to them: others may hold the same memory.
    """

    def __init__(self, layout: Layout, buffers: Buffers) -> None:
        self.layout = layout
        self.buffers = buffers

    def __getitem__(self, name: str) -> V:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self.layout.entries)

    def __len__(self) -> int:
        return len(self.layout.entries)

    @cached_property
    def _views(self) -> dict[str, V]:
        views = dict.fromkeys(self)
        for dtype, entries in self.layout.by_dtype.items():
            parts = self._split(self.buffers[dtype], [shape for _, _, shape in entries])
            views.update(zip([name for name, _, _ in entries], parts, strict=True))
        return cast(dict[str, V], views)

    @staticmethod
    @abstractmethod
    def _split(buffer: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[V]:
        """Cut a buffer into its entries."""


class FlatArrays(Flat[NDArray[Any]]):
    """A flat state as numpy arrays."""

    @classmethod
    def copy_of(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Copy arrays into buffers."""
        layout = cls.layout_of(arrays)
        buffers = {}
        for dtype, entries in layout.by_dtype.items():
            buffers[dtype] = np.concatenate([arrays[name].reshape(-1) for name, _, _ in entries])
        return cls(layout, buffers)

    @staticmethod
    def layout_of(arrays: Mapping[str, NDArray[Any]]) -> Layout:
        """Return the layout of arrays."""
        return Layout.of(
            tuple([(name, array.dtype, array.shape) for name, array in arrays.items()])
        )

    @cached_property
    def tensors(self) -> "FlatState":
        """The same memory as tensors."""
        return FlatState(self.layout, self.buffers)

    @staticmethod
    def _split(buffer: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        parts = []
        start = 0
        for shape in shapes:
            end = start + prod(shape)
            parts.append(buffer[start:end].reshape(shape))
            start = end
        return parts


class FlatState(Flat[Tensor]):
    """A flat state as torch tensors in the CPU's memory."""

    @classmethod
    def copy_of(cls, state: Mapping[str, Tensor]) -> Self:
        """Copy tensors into buffers. Tensors on a GPU are joined there, and copied in one piece."""
        layout, joined = _joined(state)
        return cls(layout, {dtype: to_host(values) for dtype, values in joined.items()})

    @classmethod
    def copies_of(cls, stacked: Mapping[str, Tensor], clients: int) -> list[Self]:
        """Split stacked tensors, of shape (clients, ...), into one state per client.

        The states share buffers.
        """
        layout, joined = joined_rows(stacked, clients)
        whole = {dtype: to_host(rows) for dtype, rows in joined.items()}
        states = []
        for client in range(clients):
            states.append(cls(layout, {dtype: rows[client] for dtype, rows in whole.items()}))
        return states

    @staticmethod
    def stacked(states: Sequence["FlatState"]) -> "FlatState":
        """Return states of one layout as one, whose tensors have a row for each: what `copies_of`
        splits.
        """
        rows = {}
        for dtype in states[0].buffers:
            rows[dtype] = np.stack([state.buffers[dtype] for state in states])
        return FlatState(states[0].layout, rows)

    @staticmethod
    def _split(buffer: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        parts = torch.as_tensor(buffer).split([prod(shape) for shape in shapes], -1)
        return [
            part.view((*part.shape[:-1], *shape)) for part, shape in zip(parts, shapes, strict=True)
        ]


def copy_there(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copy a state where it is; on the CPU that is a `FlatState`."""
    if all(value.device == CPU for value in state.values()):
        return FlatState.copy_of(state)
    layout, joined = _joined(state)
    held: Any = joined
    return FlatState(layout, held)._views


def to_device(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state on the device of another one: itself if it is there, or with one copy for each
    dtype.
    """
    device = next((value.device for value in like.values()), CPU)
    if device == CPU or all(value.device == device for value in state.values()):
        return state
    if isinstance(state, FlatState):
        flat = state
    else:
        flat = FlatState.copy_of(state)
    moved: Any = {
        dtype: torch.from_numpy(buffer).to(device) for dtype, buffer in flat.buffers.items()
    }
    return FlatState(flat.layout, moved)._views


def portions(buffer: NDArray[Any]) -> list[slice]:
    """Return the parts of a buffer that are looked at at a time."""
    return [slice(start, start + _PORTION) for start in range(0, len(buffer), _PORTION)]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype along their last dimension; on the CPU, unless all are on
    another device.
    """
    away = [part for part in parts if part.device.type != "cpu"]
    if 0 < len(away) < len(parts):
        here = iter(torch.cat(away, -1).cpu().split([part.shape[-1] for part in away], -1))
        parts = [part if part.device.type == "cpu" else next(here) for part in parts]
    return torch.cat(list(parts), -1)


def _joined(state: Mapping[str, Tensor]) -> tuple[Layout, dict[np.dtype[Any], Tensor]]:
    layout = _layout_of_tensors(state)
    joined = {}
    for dtype, entries in layout.by_dtype.items():
        joined[dtype] = join([state[name].detach().reshape(-1) for name, _, _ in entries])
    return layout, joined


def joined_rows(
    stacked: Mapping[str, Tensor], clients: int
) -> tuple[Layout, dict[np.dtype[Any], Tensor]]:
    """Return the layout of one client's state, and stacked tensors of a dtype as one, with a row
    for each client.
    """
    layout = _layout_of_tensors({name: value[0] for name, value in stacked.items()})
    joined = {}
    for dtype, entries in layout.by_dtype.items():
        rows = [stacked[name].reshape(clients, prod(shape)) for name, _, shape in entries]
        joined[dtype] = join(rows)
    return layout, joined


def to_host(values: Tensor) -> NDArray[Any]:
    """Return numbers in the CPU's memory.

    Those of a GPU come into pinned memory, if they can, which is faster.
    """
    if values.device.type == "cpu" or not pins():
        return values.numpy(force=True)
    return (
        torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        .copy_(values)
        .numpy(force=True)
    )


def _layout_of_tensors(state: Mapping[str, Tensor]) -> Layout:
    return _layout_of(tuple([(name, value.dtype, value.shape) for name, value in state.items()]))


@lru_cache(maxsize=1024)
def _layout_of(entries: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> Layout:
    return Layout.of(
        tuple(
            (name, torch.empty(0, dtype=dtype).numpy().dtype, tuple(shape))
            for name, dtype, shape in entries
        )
    )
