"""The models of several clients as one: every parameter and buffer with a row for each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedbn_flwr import training
from fedbn_flwr.state import State

#: rows of a stack that follow each other, or chosen ones
Rows = slice | Tensor


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
        module = _WithLoss(self.structure, loss_function, around)

        def one(values: State, inputs: Tensor, targets: Tensor) -> tuple[Tensor, State]:
            given = dict(values)
            loss = functional_call(module, values, (inputs, targets))
            return loss, {name: value for name, value in values.items() if value is not given[name]}

        values = {f"model.{name}": value for name, value in self._some(rows).items()}
        losses, assigned = vmap(one)(values, *batch)
        # a layer may change its buffers in place, or put new ones there
        for name in self._kept:
            if isinstance(rows, Tensor) or f"model.{name}" in assigned:
                self._kept[name][rows] = {**values, **assigned}[f"model.{name}"].detach()
        return losses

    def _some(self, rows: Rows) -> State:
        everything = {**self._learned, **self._kept}
        if isinstance(rows, slice) and rows == slice(0, self.clients):
            return everything
        return {name: value[rows] for name, value in everything.items()}


class _WithLoss(nn.Module):
    """A model and its loss: inside `functional_call`, a layer's attributes are the client's own."""

    def __init__(
        self,
        model: nn.Module,
        loss_function: training.LossFunction,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.model, self._loss_function, self._around = model, loss_function, around

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._around():
            return training.model_loss(self.model, inputs, targets, self._loss_function)


def stacked(states: Sequence[State]) -> State:
    """One state of which each tensor has a row for each of some states, which have the same names."""
    first = states[0]
    if all(state is first for state in states):
        return {name: value.expand(len(states), *value.shape).clone() for name, value in first.items()}
    return {name: torch.stack([state[name] for state in states]) for name in first}


def unstacked(values: State, clients: int) -> list[State]:
    """Each client's rows, which share memory with the stack."""
    rows = {name: value.detach().unbind() for name, value in values.items()}
    return [{name: parts[client] for name, parts in rows.items()} for client in range(clients)]


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
