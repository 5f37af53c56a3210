"""Gathered moments on the wire: `LAYER/count`, `LAYER/mean` and `LAYER/variance`, in float64."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr.norm import Moments
from fedbn_flwr.state import State

V = TypeVar("V")


def under_all_names(model: nn.Module, by_layer: Mapping[str, V]) -> Iterator[tuple[str, V]]:
    """Yield the value of each layer with running statistics, under every name by which the model
    lists the layer.
    """
    values = {id(model.get_submodule(name)): value for name, value in by_layer.items()}
    for name, layer in model.named_modules(remove_duplicate=False):
        if id(layer) in values and layer.running_mean is not None:
            yield name, values[id(layer)]


def pack_moments(model: nn.Module, seen: Mapping[str, Moments]) -> State:
    """Name the moments; a layer that the model lists under several names is sent under each of
    them.
    """
    packed: dict[str, Tensor] = {}
    for name, moments in under_all_names(model, seen):
        packed[f"{name}/count"] = torch.tensor(float(moments.count), dtype=torch.float64)
        packed[f"{name}/mean"] = moments.mean
        packed[f"{name}/variance"] = moments.variance
    return packed


def unpack_moments(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Moments]:
    """Return the moments by layer."""
    values = {name: torch.from_numpy(array) for name, array in arrays.items()}
    layers = dict.fromkeys(name.rpartition("/")[0] for name in values)
    return {
        layer: Moments(
            int(values[f"{layer}/count"]), values[f"{layer}/mean"], values[f"{layer}/variance"]
        )
        for layer in layers
    }


def own_statistics(model: nn.Module, seen: Mapping[str, Moments]) -> State:
    """Return a model's running statistics as these moments have them, by all names and in the
    model's numbers.
    """
    entries = running_statistics(dict(under_all_names(model, seen)))
    values = model.state_dict()
    return {name: value.to(values[name]) for name, value in entries.items()}


def running_statistics(pooled: Mapping[str, Moments]) -> State:
    """Pooled moments as the state-dict entries of BN layers.

    Variances are corrected by n / (n - 1).
    """
    entries: dict[str, Tensor] = {}
    for layer, moments in pooled.items():
        prefix = f"{layer}." if layer else ""
        entries[f"{prefix}running_mean"] = moments.mean
        entries[f"{prefix}running_var"] = moments.running_variance(unbiased=True)
    return entries
