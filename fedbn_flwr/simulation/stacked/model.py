"""The models of several clients as one: every parameter and buffer with a row for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedbn_flwr.client import training
from fedbn_flwr.simulation.stacked.batch_norm import Beside
from fedbn_flwr.state import State

#: rows of a stack that follow each other, or chosen ones
Rows = slice | Tensor

#: targets of this class do not count in a cross entropy, by default
_LEFT_OUT = -100


class Stack(nn.Module):
    """What a model looks like from outside, with a first dimension for the clients.

    `structure`, a model like theirs that nobody else uses, says which layer an entry belongs to, and lends
    `torch.func` its forward; it may be frozen and set to train like any model. Its own values are not used.
    """

    structure: nn.Module

    def __init__(self, structure: nn.Module, states: Sequence[State]) -> None:
        super().__init__()
        # not as a submodule: its parameters are not those of the stack
        object.__setattr__(self, "structure", structure)
        self.clients = len(states)
        #: by its id, the name under which an entry is known first; tied entries have several
        first = {id(value): name for name, value in reversed(_entries(structure).items())}
        self._names = {name: first[id(value)] for name, value in _entries(structure).items()}
        self._slots = _Slots(structure, self._names)
        self._beside = Beside(structure)
        self._learned = {
            name: nn.Parameter(_rows(value, name, states), requires_grad=value.requires_grad)
            for name, value in structure.named_parameters()
        }
        self._kept = {name: _rows(value, name, states) for name, value in structure.named_buffers()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Stacked."""
        return iter(self._learned.items())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Stacked."""
        return iter(self._kept.items())

    def state_dict(self, *_: Any, **__: Any) -> State:  # type: ignore[override]  # the stack has no layers to ask
        """Stacked, by the names of a client's model."""
        values = {**self._learned, **self._kept}
        return {name: values[self._names[name]].detach() for name in self.structure.state_dict()}

    def losses(
        self,
        rows: Rows,
        batch: training.Batch,
        loss_function: training.LossFunction,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """The mean loss of each of some clients on its own batch; `around` is entered inside `vmap`."""
        # of samples that count alike, the loss is one pass over all clients' outputs
        by_rows = loss_function is F.cross_entropy and not batch[1].is_floating_point()
        wanted = _outputs if by_rows else loss_function
        values, entered = self._some(rows), self.structure
        slots, beside, kept = self._slots, self._beside, list(self._kept)
        assigned: list[str] = []

        def one(inputs: Tensor, targets: Tensor, *entries: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(values, entries, strict=True))
            with slots.holding(given), beside.used(), around():
                found = training.model_loss(entered, inputs, targets, wanted)
                # a layer may change its buffers in place, or put new ones there
                new = {name: slots.read(name) for name in kept}
            assigned[:] = [name for name in kept if new[name] is not given[name]]
            return found, *(new[name] for name in assigned)

        found, *news = vmap(one)(*batch, *values.values())
        changed = {**values, **dict(zip(assigned, news, strict=True))}
        for name in kept:
            if isinstance(rows, Tensor) or name in assigned:
                self._kept[name][rows] = changed[name].detach()
        return _cross_entropies(found, batch[1]) if by_rows else found

    def _some(self, rows: Rows) -> State:
        everything = {**self._learned, **self._kept}
        if isinstance(rows, slice) and rows == slice(0, self.clients):
            return everything
        return {name: value[rows] for name, value in everything.items()}


class _Slots:
    """Where a model's parameters and buffers are, so that others can take their places for a while."""

    def __init__(self, structure: nn.Module, names: Mapping[str, str]) -> None:
        #: by the name under which an entry is known first: every dictionary of a layer that holds it, and its key
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
        for prefix, layer in structure.named_modules(remove_duplicate=False):
            for entries in (layer._parameters, layer._buffers):
                for key, value in entries.items():
                    if value is not None:
                        self._places[names[f"{prefix}.{key}" if prefix else key]].append((entries, key))

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside the block the model has these values."""
        own = [(entries, key, entries[key]) for places in self._places.values() for entries, key in places]
        try:
            for name, value in values.items():
                for entries, key in self._places[name]:
                    entries[key] = value
            yield
        finally:
            for entries, key, value in own:
                entries[key] = value

    def read(self, name: str) -> Tensor:
        """The value that the model has now."""
        entries, key = self._places[name][0]
        value: Tensor = entries[key]
        return value


def _outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """In place of a loss, where that comes later."""
    return outputs


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of each client's samples, without those that `F.cross_entropy` leaves out."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
    counted = (targets != _LEFT_OUT).flatten(1).sum(1)
    return losses.view(targets.shape).flatten(1).sum(1) / counted


def stacked(states: Sequence[State]) -> State:
    """One state of which each tensor has a row for each of some states, which have the same names."""
    first = states[0]
    if all(state is first for state in states):
        return {name: value.expand(len(states), *value.shape).clone() for name, value in first.items()}
    return {name: torch.stack([state[name] for state in states]) for name in first}


def _entries(structure: nn.Module) -> dict[str, Tensor]:
    kept = dict(structure.named_buffers(remove_duplicate=False))
    return {**dict(structure.named_parameters(remove_duplicate=False)), **kept}


def _rows(value: Tensor, name: str, states: Sequence[State]) -> Tensor:
    """Every client's value, in the model's dtype and on its device; of what is not in its state, the model's own."""
    if name not in states[0]:
        return value.detach().expand(len(states), *value.shape).clone()
    first = states[0][name]
    if all(state[name] is first for state in states):
        return first.to(value).expand(len(states), *value.shape).clone()
    return torch.stack([state[name] for state in states]).to(value)
