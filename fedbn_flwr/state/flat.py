"""States as one run of numbers for each dtype: what is done to a whole state then takes one operation, not hundreds."""

from abc import abstractmethod
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: name, dtype and shape
Entry = tuple[str, np.dtype[Any], tuple[int, ...]]
Runs = dict[np.dtype[Any], NDArray[Any]]

V = TypeVar("V")


class Layout:
    """What a state is made of; states that are alike have the same object, as far as `lay_out` remembers it."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        #: by dtype, the entries of its run, in the state's order
        self.runs: dict[np.dtype[Any], list[Entry]] = {}
        for entry in entries:
            self.runs.setdefault(entry[1], []).append(entry)

    def names(self, dtype: np.dtype[Any]) -> list[str]:
        """Of a run."""
        return [name for name, _, _ in self.runs[dtype]]

    def __reduce__(self) -> tuple[Any, tuple[tuple[Entry, ...]]]:
        """In another process, the object of that process."""
        return lay_out, (self.entries,)


@lru_cache(maxsize=1024)
def lay_out(entries: tuple[Entry, ...]) -> Layout:
    """The layout of these entries."""
    return Layout(entries)


class Flat(Mapping[str, V], Generic[V]):
    """A state by name, each entry a view of its run. It is to be read only: others may hold the same memory."""

    def __init__(self, layout: Layout, runs: Runs) -> None:
        self.layout, self.runs = layout, runs
        self._seen: dict[str, V] | None = None

    def __getitem__(self, name: str) -> V:
        """An entry."""
        return self._views()[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the state's order."""
        return (name for name, _, _ in self.layout.entries)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self.layout.entries)

    def __contains__(self, name: object) -> bool:
        """Whether there is such an entry."""
        return name in self._views()

    def keys(self) -> KeysView[str]:
        """Those of a dictionary, which are faster than a mapping's; likewise the next two."""
        return self._views().keys()

    def values(self) -> ValuesView[V]:
        """The entries."""
        return self._views().values()

    def items(self) -> ItemsView[str, V]:
        """Names and entries."""
        return self._views().items()

    def copy(self) -> Self:
        """The same in memory of its own."""
        return type(self)(self.layout, {dtype: run.copy() for dtype, run in self.runs.items()})

    def _views(self) -> dict[str, V]:
        """Made together, at the first use of any."""
        if self._seen is None:
            found = dict.fromkeys(self)
            for dtype, entries in self.layout.runs.items():
                shapes = [shape for _, _, shape in entries]
                found.update(zip(self.layout.names(dtype), self._split(self.runs[dtype], shapes), strict=True))
            self._seen = cast(dict[str, V], found)
        return self._seen

    @staticmethod
    @abstractmethod
    def _split(run: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[V]:
        """The entries of a run."""


class FlatArrays(Flat[NDArray[Any]]):
    """As numpy's arrays."""

    @classmethod
    def copy_of(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The same numbers in runs of their own."""
        layout = cls.layout_of(arrays)
        runs = {
            dtype: np.concatenate([arrays[name].reshape(-1) for name in layout.names(dtype)]) for dtype in layout.runs
        }
        return cls(layout, runs)

    @staticmethod
    def layout_of(arrays: Mapping[str, NDArray[Any]]) -> Layout:
        """What arrays are made of."""
        return lay_out(tuple([(name, array.dtype, array.shape) for name, array in arrays.items()]))

    @cached_property
    def tensors(self) -> "FlatState":
        """The same memory as tensors."""
        return FlatState(self.layout, self.runs)

    @staticmethod
    def _split(run: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        parts, start = [], 0
        for shape in shapes:
            end = start + prod(shape)
            parts.append(run[start:end].reshape(shape))
            start = end
        return parts


class FlatState(Flat[Tensor]):
    """As torch's tensors, in the processor's memory."""

    @classmethod
    def copy_of(cls, state: Mapping[str, Tensor]) -> Self:
        """The same numbers in runs of their own."""
        return cls.joined(state_layout(state), [value.detach() for value in state.values()])

    @classmethod
    def joined(cls, layout: Layout, values: Sequence[Tensor]) -> Self:
        """Tensors that are laid out so, in runs of their own; from a GPU each run at once."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in values:
            by_dtype.setdefault(value.dtype, []).append(value.reshape(-1))
        return cls(layout, dict(zip(layout.runs, map(_run, by_dtype.values()), strict=True)))

    @classmethod
    def copies_of(cls, stacked: Mapping[str, Tensor], clients: int) -> list[Self]:
        """One for each row of tensors of which each has one for every client."""
        layout = state_layout({name: value[0] for name, value in stacked.items()})
        runs = {
            dtype: _run([stacked[name].reshape(clients, prod(shape)) for name, _, shape in entries])
            for dtype, entries in layout.runs.items()
        }
        return [cls(layout, {dtype: run[client] for dtype, run in runs.items()}) for client in range(clients)]

    @staticmethod
    def _split(run: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        parts = torch.from_numpy(run).split([prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _run(parts: Sequence[Tensor]) -> NDArray[Any]:
    """Tensors of one dtype as one, by their last dimension."""
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    joined: NDArray[Any] = torch.cat(list(parts), -1).numpy(force=True)
    return joined


def state_layout(state: Mapping[str, Tensor]) -> Layout:
    """What tensors are made of."""
    return _layout_of(tuple([(name, value.dtype, value.shape) for name, value in state.items()]))


@lru_cache(maxsize=1024)
def _layout_of(entries: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> Layout:
    return lay_out(tuple((name, _numpy_dtype(dtype), tuple(shape)) for name, dtype, shape in entries))


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
