"""A model's state as named arrays: between PyTorch and Flower, loaded, copied, and its entries in
groups.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr import norm
from fedbn_flwr.state.flat import FlatArrays, FlatState, copy_there, to_device
from fedbn_flwr.state.records import flat_of, record_of, view_array

#: tensors by name; do not write to them, because others may hold the same memory
State = Mapping[str, Tensor]
#: a state on the server's side
Arrays = dict[str, NDArray[Any]]


def to_record(state: Mapping[str, Tensor], *, copy: bool = True) -> ArrayRecord:
    """Pack tensors by name, each with its own dtype and shape: a 0-d int64 counter stays one.

    With `copy=False` the record shares the memory of a `FlatState`, which nobody may change any
    more.
    """
    if isinstance(state, FlatState) and not copy:
        flat = state
    else:
        flat = FlatState.copy_of(state)
    return record_of(FlatArrays(flat.layout, flat.buffers))


def from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Unpack a record into tensors that own their memory."""
    flat = flat_of(record)
    if flat is not None:
        return {name: value.clone() for name, value in flat.tensors.items()}
    return {name: torch.from_numpy(view_array(array).copy()) for name, array in record.items()}


def view_record(record: ArrayRecord) -> State:
    """Unpack a record into tensors that may share its memory: do not write to them."""
    flat = flat_of(record)
    if flat is not None:
        return flat.tensors
    return {name: torch.from_numpy(view_array(array)) for name, array in record.items()}


def arrays_to_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Pack copies of arrays for a message."""
    return record_of(
        FlatArrays.copy_of({name: np.asarray(value) for name, value in arrays.items()})
    )


def arrays_of(packed: ArrayRecord) -> Arrays:
    """Copies of the arrays of a message."""
    flat = flat_of(packed)
    if flat is not None:
        return {name: array.copy() for name, array in flat.items()}
    return {name: array.numpy() for name, array in packed.items()}


def view_arrays(packed: ArrayRecord) -> FlatArrays:
    """The arrays of a message, without copies where they were never serialized: to be read only."""
    flat = flat_of(packed)
    if flat is None:
        return FlatArrays.copy_of({name: view_array(array) for name, array in packed.items()})
    return flat


@torch.no_grad()
def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the whole state.

    ValueError names an entry that is missing, unknown or of another shape.
    """
    target = check_fit(model, state)
    if target:
        values = dict(to_device(state, target).items())
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, value in target.items():
            by_dtype.setdefault(value.dtype, []).append(name)
        for names in by_dtype.values():  # of several, a GPU copies one by one
            torch._foreach_copy_([target[name] for name in names], [values[name] for name in names])


def check_fit(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Compare names and shapes with the model's own state, and return the latter."""
    target = model.state_dict()
    values = dict(state.items())
    missing = sorted(target.keys() - values.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} entries of the model were not received, the first is {missing[0]!r}"
        )
    unknown = sorted(values.keys() - target.keys())
    if unknown:
        raise ValueError(
            f"{len(unknown)} received arrays are not of the model, the first is {unknown[0]!r}"
        )
    for name, value in target.items():
        if value.shape != values[name].shape:
            due = tuple(value.shape)
            shape = tuple(values[name].shape)
            raise ValueError(f"array {name!r} has shape {shape}, the model needs {due}")
    return target


def snapshot(model: nn.Module, names: Collection[str] | None = None) -> FlatState:
    """Copy the state, or the named entries of it, into the CPU's memory."""
    return FlatState.copy_of(_entries(model, names))


def own_copy(model: nn.Module, names: Collection[str]) -> State:
    """Copy the named entries of the state, on the model's device."""
    return copy_there(_entries(model, names))


def _entries(model: nn.Module, names: Collection[str] | None) -> State:
    state = model.state_dict()
    return {name: value for name, value in state.items() if names is None or name in names}


def group_keys(model: nn.Module, group: str) -> set[str]:
    """Return the state-dict entries of one of `wire.GROUPS`, found by the type of the layer that
    holds them.
    """
    if group not in _GROUPS:
        raise ValueError(f"unknown group of entries {group!r}; known: {', '.join(_GROUPS)}")
    return with_all_names(model, {name for keys in _GROUPS[group] for name in keys(model)})


def with_all_names(model: nn.Module, names: set[str]) -> set[str]:
    """Return entries by all of their names."""
    tied = tied_names(model) if names else {}
    first = {tied.get(name, name) for name in names}
    return names | first | {name for name in tied if tied[name] in first}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of entries that have several, each with the first name of the
    entry.
    """
    first: dict[int, str] = {}
    entries = model.state_dict(keep_vars=True).items()
    return {
        name: first[id(value)]
        for name, value in entries
        if first.setdefault(id(value), name) != name
    }


#: the functions that name the entries of each group
_GROUPS: dict[str, tuple[Callable[[nn.Module], Iterable[str]], ...]] = {
    "none": (),
    "statistics": (norm.statistics_keys, norm.counter_keys),
    "affine": (norm.affine_keys,),
    "bn": (norm.statistics_keys, norm.counter_keys, norm.affine_keys, norm.local_keys),
    "mix": (norm.local_keys,),
    "all": (nn.Module.state_dict,),
}
