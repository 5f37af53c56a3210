"""The tensors of a model's state, found without asking every layer for its part of it each time."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from fedbn_flwr.state.flat import Layout, state_layout


class Entries(NamedTuple):
    """The model's own tensors, in the order of its state dict, and what they are made of."""

    values: list[Tensor]
    layout: Layout
    #: for what others find out about the entries' names, which stays true as long as this does
    notes: dict[Any, Any]

    def part(self, names: Collection[str]) -> "Entries":
        """Those of some names."""
        if (chosen := frozenset(names)) not in self.notes:
            kept = [number for number, (name, _, _) in enumerate(self.layout.entries) if name in chosen]
            self.notes[chosen] = kept, Layout.of(tuple(self.layout.entries[number] for number in kept))
        kept, layout = self.notes[chosen]
        return Entries([self.values[number] for number in kept], layout, {})


def entries_of(model: nn.Module) -> Entries | None:
    """The entries; None for a model that makes its state dict of other things than parameters and buffers.

    Where they are is kept from the last time, for as long as nothing says that they may be elsewhere.
    """
    layers = layers_of(model)
    known = _KNOWN.get(model)
    if known is not None and known.has(layers):
        if not known.tells:
            return None
        if (entries := known.entries(layers)) is not None:
            return entries
    known = _KNOWN[model] = _Known(model, layers)
    return known.entries(layers)


class _Layer:
    """What decides which entries a layer has, and what they are called."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._children = ref(layer), tuple(layer._modules)
        self._passing, self._held = set(layer._non_persistent_buffers_set), _held(layer)

    def is_still(self, layer: nn.Module) -> bool:
        return (
            self._layer() is layer
            and self._held == _held(layer)
            and self._children == tuple(layer._modules)
            and self._passing == layer._non_persistent_buffers_set
        )


class _Entry:
    """Where one is, and what it is."""

    def __init__(self, number: int, kept: bool, key: str, value: Tensor) -> None:
        self._place, self._value = (number, kept, key), ref(value)
        self._dtype, self._shape = value.dtype, value.shape

    def find(self, layers: Sequence[nn.Module]) -> Tensor | None:
        number, kept, key = self._place
        value = (layers[number]._buffers if kept else layers[number]._parameters).get(key)
        if value is None or self._value() is not value:
            return None
        # both can change in place
        return value if value.dtype == self._dtype and value.shape == self._shape else None


class _Known:
    """Where entries were. Of the model it holds nothing, which would keep it alive."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._layers = [_Layer(layer) for layer in layers]
        self._entries: list[_Entry] | None = None
        self._notes: dict[Any, Any] = {}
        self._layout = _layout(state := model.state_dict(keep_vars=True))
        places = _places(model, layers)
        found = [places.get(name) for name in state]
        if self._layout and all(place and place[3] is state[name] for name, place in zip(state, found, strict=True)):
            self._entries = [_Entry(*place) for place in found if place]

    @property
    def tells(self) -> bool:
        """Whether the state is made of what layers have."""
        return self._entries is not None

    def has(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are the layers."""
        same = len(layers) == len(self._layers)
        return same and all(known.is_still(layer) for known, layer in zip(self._layers, layers, strict=True))

    def entries(self, layers: Sequence[nn.Module]) -> Entries | None:
        """The entries, if they are still there."""
        if self._entries is None or self._layout is None:
            return None
        values = [value for entry in self._entries if (value := entry.find(layers)) is not None]
        return Entries(values, self._layout, self._notes) if len(values) == len(self._entries) else None


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Those of `model.modules()`, some several times, without its bookkeeping."""
    layers = [model]
    for layer in layers:
        if layer._modules:
            layers.extend(child for child in layer._modules.values() if child is not None)
    return layers


def _places(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, tuple[int, bool, str, Tensor]]:
    """By its name in a state dict, which layer has an entry, whether among its buffers, by what key, and the entry."""
    prefixes = [""]
    for prefix, layer in zip(prefixes, layers, strict=False):
        prefixes.extend(f"{prefix}{name}." for name, child in layer._modules.items() if child is not None)
    places = {}
    for number, (prefix, layer) in enumerate(zip(prefixes, layers, strict=True)):
        for kept, entries in ((False, layer._parameters), (True, layer._buffers)):
            for key, value in entries.items():
                if value is not None:
                    places[f"{prefix}{key}"] = number, kept, key, value
    return places


def _held(layer: nn.Module) -> list[int]:
    """Which entries a layer has."""
    return [*map(id, layer._parameters.values()), *map(id, layer._buffers.values())]


def _layout(state: dict[str, Tensor]) -> Layout | None:
    """None for numbers that numpy does not have."""
    try:
        return state_layout(state)
    except (AttributeError, TypeError):
        return None
