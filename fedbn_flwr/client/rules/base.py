"""The shape of a rule."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction


@dataclass
class Session:
    """One round of local training, as a rule sees it: of one client, or of several with stacked models.

    Stacked, every tensor has a first dimension with a row for each client, `memory` hands out and takes such tensors,
    and `structure` is a model of one client.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    instruction: Instruction
    received: Mapping[str, State]
    memory: Memory
    #: state entries that stay on the client
    local: Collection[str] = ()
    #: how many steps the round has; stacked, if clients have different numbers, each one's
    steps: int | Tensor = 0
    #: the layers behind the parameters: the model itself, unless it is stacked
    structure: nn.Module | None = None
    #: what rules add to the reply
    records: dict[str, State] = field(default_factory=dict)
    metrics: dict[str, float | list[float]] = field(default_factory=dict)

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    @property
    def stacked(self) -> bool:
        """Whether the session is one of several clients at once."""
        return self.structure is not None


@dataclass(eq=False, kw_only=True)
class Rule:
    """The client half of a method: called before the first step, between gradient and step, and after the last step.

    A subclass is registered with `register_rule`. Its dataclass fields are keys of the instruction.
    """

    #: whether the rule works on the stacked models of several clients
    stacks: ClassVar[bool] = True
    #: whether `begin` uses the optimizer, which a loop of a user's own makes later than its model
    needs_optimizer: ClassVar[bool] = False
    #: rules change gradients in this order; equal ones in the alphabetical order of their keys
    order: ClassVar[int] = 0

    def begin(self, session: Session) -> None:
        """Prepare; the model holds what was received."""

    def adjust(self) -> None:
        """Change the gradients in place."""

    def finish(self, session: Session) -> None:
        """Add to the reply, or store in the node's memory."""


def on_device(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> State:
    """The entries of `state` that `like` has, on its devices and in its dtypes."""
    return {name: state[name].to(like[name]) for name in like if name in state}
