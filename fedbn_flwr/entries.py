"""The tensors of a model's state, found without asking every layer for its part of it each time."""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn

from fedbn_flwr.flat import Layout, state_layout

#: which layer has an entry, whether among its buffers, and by what key
Place = tuple[int, bool, str]


class Entries:
    """The model's own tensors, in the order of its state dict, and what they are made of."""

    def __init__(self, values: Sequence[Tensor], layout: Layout) -> None:
        self.values, self.layout = values, layout


def entries_of(model: nn.Module) -> Entries | None:
    """The entries; None for a model that makes its state dict of other things than parameters and buffers.

    Where they are is kept from the last time, for as long as the model has the same layers and tensors.
    """
    layers = _layers(model)
    known = _KNOWN.get(model)
    values = None if known is None else known.values(layers)
    if known is None or values is None:
        known = _KNOWN[model] = _Known(model, layers)
        values = known.values(layers)
    return None if values is None or known.layout is None else Entries(values, known.layout)


class _Known:
    """Where entries were. Of the model it holds nothing, which would keep it alive."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        places = {id(value): place for place, value in _tensors(layers)}
        self._layers, self._count = [ref(layer) for layer in layers], _count(layers)
        self._places: list[Place] = []
        self._values: list[ReferenceType[Tensor]] = []
        #: None where an entry is nothing that a layer has
        self.layout: Layout | None = None
        if all(id(value) in places for value in state.values()):
            self._places = [places[id(value)] for value in state.values()]
            self._values = [ref(value) for value in state.values()]
            self.layout = state_layout(state)

    def values(self, layers: Sequence[nn.Module]) -> list[Tensor] | None:
        """The entries, if they are still there."""
        same = len(layers) == len(self._layers) and _count(layers) == self._count
        if not same or any(known() is not layer for known, layer in zip(self._layers, layers, strict=True)):
            return None
        found = [
            (layers[number]._buffers if kept else layers[number]._parameters).get(key)
            for number, kept, key in self._places
        ]
        values = [
            value for value, known in zip(found, self._values, strict=True) if value is not None and known() is value
        ]
        return values if len(values) == len(found) else None


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def _layers(model: nn.Module) -> list[nn.Module]:
    """Those of `model.modules()`, some several times, without its bookkeeping."""
    layers = [model]
    for layer in layers:
        if layer._modules:
            layers.extend(child for child in layer._modules.values() if child is not None)
    return layers


def _tensors(layers: Sequence[nn.Module]) -> Iterator[tuple[Place, Tensor]]:
    for number, layer in enumerate(layers):
        kinds: tuple[tuple[bool, dict[str, Any]], ...] = (False, layer._parameters), (True, layer._buffers)
        for kept, entries in kinds:
            for key, value in entries.items():
                if value is not None:
                    yield (number, kept, key), value


def _count(layers: Sequence[nn.Module]) -> int:
    return sum(len(layer._parameters) + len(layer._buffers) for layer in layers)
