"""The models of several clients as one module: every parameter and buffer has a row for each
client.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.func import vmap

from fedbn_flwr.client import training
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.device import Rows
from fedbn_flwr.layerwise.carried import CorrectedClients
from fedbn_flwr.randomness import OwnRandomness
from fedbn_flwr.simulation.stacked.stacked_layers import CannotStackError, StackedLayers
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState, joined_rows, to_device

#: stacks on an accelerator that are kept for further rounds
MOST = 4

#: targets of this class do not count in torch's cross entropy
_IGNORED_CLASS = -100


class Stack(nn.Module):
    """Clients' models as one module, each tensor with a first dimension for the clients.

    `structure`, a model like theirs that nobody else uses, says which layer an entry belongs to,
    and its forward is what `torch.func` maps over the clients. It may be frozen and set to train
    like any model; its values are not used.
    """

    structure: nn.Module

    def __init__(self, structure: nn.Module, states: Sequence[State]) -> None:
        super().__init__()
        # not as a submodule: its parameters are not those of the stack
        object.__setattr__(self, "structure", structure)
        self.rate_factors = getattr(structure, "rate_factors", {})
        self.clients = len(states)
        #: by an entry's id, the first of its names; tied entries have several
        entries: dict[str, Tensor] = dict(structure.named_parameters(remove_duplicate=False))
        entries |= structure.named_buffers(remove_duplicate=False)
        first = {id(value): name for name, value in reversed(entries.items())}
        self._names = {name: first[id(value)] for name, value in entries.items()}
        self._slots = _Slots(structure, self._names)
        self._layers = StackedLayers(structure)
        self._entries = entries
        rows = {
            name: value.new_empty((self.clients, *value.shape)) for name, value in entries.items()
        }
        self._parameters_of_all = {
            name: nn.Parameter(rows[name], value.requires_grad)
            for name, value in structure.named_parameters()
        }
        self._buffers_of_all = {name: rows[name] for name, _ in structure.named_buffers()}
        #: the exchange of steps under corrections
        self.corrected = CorrectedClients(self.clients)
        self.load(states)

    @torch.no_grad()
    def load(self, states: Sequence[State]) -> None:
        """Overwrite what the stack holds, in the tensors that it has, each of the model's dtype.

        Where states lack an entry, clients get the structure's. What learns is what learns in the
        structure.
        """
        if any(state is not states[0] for state in states):
            count = self.clients
            rows = stacked(states, self._entries)
        else:
            count = 1
            rows = {
                name: value[None] for name, value in to_device(states[0], self._entries).items()
            }
        values = {**self._parameters_of_all, **self._buffers_of_all}
        given = {}
        for name, value in values.items():
            own = rows.get(name, self._entries[name][None])
            given[name] = own.to(value.dtype).expand(count, *value.shape[1:])
        # in few operations, however many entries there are
        layout, joined = joined_rows(given, count)
        for dtype, entries in layout.by_dtype.items():
            whole = joined[dtype].expand(self.clients, -1)
            if whole.device.type != "cpu":
                whole = whole.contiguous()  # else a GPU copies one by one
            sizes = [prod(shape) for _, _, shape in entries]
            targets = [
                values[name].view(self.clients, size)
                for (name, _, _), size in zip(entries, sizes, strict=True)
            ]
            torch.split_with_sizes_copy(whole, sizes, 1, out=targets)
        for name, parameter in self._parameters_of_all.items():
            parameter.requires_grad_(self._entries[name].requires_grad)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters, stacked."""
        return iter(self._parameters_of_all.items())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers, stacked."""
        return iter(self._buffers_of_all.items())

    def state_dict(self, *_: Any, **__: Any) -> State:  # type: ignore[override]  # the stack has no layers to ask
        """Return all entries, stacked, by the names of a client's model."""
        values = {**self._parameters_of_all, **self._buffers_of_all}
        return {name: values[self._names[name]].detach() for name in self.structure.state_dict()}

    def losses(
        self,
        rows: Rows,
        batch: Sequence[Tensor],
        loss_function: training.LossFunction,
        streams: Sequence[OwnRandomness] = (),
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Return the mean loss of each of these clients on its own batch.

        `around` is entered inside `vmap`.

        Dropout takes the masks that the batch has behind inputs and targets, which `draw_masks`
        has drawn, or draws from the clients' streams.
        """
        images, labels, *masks = batch
        layers = self._layers.used(streams, masks, images.shape)
        # the cross entropy of class numbers is computed in one pass over all clients' outputs
        afterwards = loss_function is F.cross_entropy and not labels.is_floating_point()
        loss_or_logits = loss_function
        if afterwards:
            loss_or_logits = _logits
        buffers = list(self._buffers_of_all)

        def one(
            inputs: Tensor, targets: Tensor, entries: dict[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """Return one client's result, and the buffers in whose places a layer has put new
            ones.
            """
            with self._slots.holding(entries), layers, around():
                result = training.model_loss(self.structure, inputs, targets, loss_or_logits)
                now = {name: self._slots.read(name) for name in buffers}
            return result, {
                name: value for name, value in now.items() if value is not entries[name]
            }

        values = self._entries_of(rows)
        result, replaced = vmap(one)(self._layers.images(images), labels, values)
        for name in buffers:
            # other buffers may have been changed in their places; those of some rows are copies
            if values[name] is not self._buffers_of_all[name] or name in replaced:
                self._buffers_of_all[name][rows] = replaced.get(name, values[name]).detach()
        if afterwards:
            return _cross_entropies(result, labels)
        return result

    def draw_masks(self, inputs: Tensor, streams: Sequence[OwnRandomness]) -> list[Tensor]:
        """Draw what dropout needs in a step on these inputs, ahead of it, where that is known."""
        return self._layers.draw_masks(inputs, streams)

    def _entries_of(self, rows: Rows) -> dict[str, Tensor]:
        if isinstance(rows, slice) and rows == slice(0, self.clients):
            return {**self._parameters_of_all, **self._buffers_of_all}
        chosen = {name: value[rows] for name, value in self._parameters_of_all.items()}
        # copies: autograd would refuse to use views of buffers of which other clients' rows have
        # changed since
        return chosen | {name: value[rows].clone() for name, value in self._buffers_of_all.items()}


class Stacks:
    """Makes stacks; on an accelerator of the latest ones again, whose tensors are where captured
    steps expect them.
    """

    def __init__(self) -> None:
        #: by the id of a structure, which a stack keeps alive, and the number of clients
        self._latest: OrderedDict[tuple[int, int], Stack] = OrderedDict()

    def clear(self) -> None:
        """Forget all stacks, whose memory is free then."""
        self._latest.clear()

    def make(self, structure: nn.Module, states: Sequence[State]) -> Stack:
        """Return a stack of clients that start from these states."""
        key = id(structure), len(states)
        if key in self._latest:
            self._latest.move_to_end(key)
            self._latest[key].load(states)
            return self._latest[key]
        stack = Stack(structure, states)
        if any(value.device.type != "cpu" for _, value in stack.named_parameters()):
            self._latest[key] = stack
            if len(self._latest) > MOST:
                self._latest.popitem(last=False)
        return stack


class _Slots:
    """The places of a model's parameters and buffers, where other tensors can be put for a
    while.
    """

    def __init__(self, structure: nn.Module, names: Mapping[str, str]) -> None:
        #: by an entry's first name: every dictionary of a layer that holds it, and its key there
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {
            name: [] for name in names.values()
        }
        for prefix, layer in structure.named_modules(remove_duplicate=False):
            for entries in (layer._parameters, layer._buffers):
                for key, value in entries.items():
                    if value is not None:
                        self._places[names[f"{prefix}.{key}" if prefix else key]].append(
                            (entries, key)
                        )

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the model these values, inside the block."""
        before = [
            (entries, key, entries[key])
            for places in self._places.values()
            for entries, key in places
        ]
        try:
            for name, value in values.items():
                for entries, key in self._places[name]:
                    entries[key] = value
            yield
        finally:
            for entries, key, value in before:
                entries[key] = value

    def read(self, name: str) -> Tensor:
        """Return the value that the model has now."""
        entries, key = self._places[name][0]
        value: Tensor = entries[key]
        return value


def _logits(outputs: Any, _: Tensor) -> Tensor:
    return training.logits_of(outputs)


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each client's mean over its samples, without those that `F.cross_entropy` ignores."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
    counted = (targets != _IGNORED_CLASS).flatten(1).sum(1)
    return losses.view(targets.shape).flatten(1).sum(1) / counted


def stacked(states: Sequence[State], like: State = MappingProxyType({})) -> State:
    """Return states of the same names as one, where tensors have a row for each, on the CPU or the
    device of `like`.
    """
    first = states[0]
    if all(state is first for state in states):
        moved = to_device(first, like)
        return {
            name: value.expand(len(states), *value.shape).clone() for name, value in moved.items()
        }
    flat = [state for state in states if isinstance(state, FlatState)]
    if len(flat) == len(states) and len({id(state.layout) for state in flat}) == 1:
        return to_device(FlatState.stacked(flat), like)
    return to_device({name: torch.stack([state[name] for state in states]) for name in first}, like)


class StackedMemory(Memory):
    """The memories of several clients, which must hold the same entries of a group."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        super().__init__(RecordDict())
        self._memories = memories
        self._stored = dict[str, State]()

    def recall(self, group: str) -> State:
        """Return a group's values of all clients, stacked."""
        states = [memory.recall(group) for memory in self._memories]
        if any(state.keys() != states[0].keys() for state in states):
            raise CannotStackError(f"the clients remember different entries of {group!r}")
        return stacked(states)

    def store(self, group: str, values: State) -> None:
        """Hold stacked values until `write`."""
        self._stored[group] = values

    def write(self) -> None:
        """Store every client's rows, as copies, in the client's own memory."""
        for group, values in self._stored.items():
            for memory, rows in zip(
                self._memories, FlatState.copies_of(values, len(self._memories)), strict=True
            ):
                memory.store(group, rows)
