"""The shape of a rule."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedbn_flwr.memory import Memory
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction


@dataclass
class Session:
    """One round of local training, as a rule sees it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    instruction: Instruction
    received: Mapping[str, State]
    memory: Memory
    #: state entries that stay on the client
    local: Collection[str] = ()
    #: what rules add to the reply
    records: dict[str, State] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}


class Rule:
    """Three moments of a round: before the first step, between gradient and step, after the last step."""

    def begin(self, session: Session) -> None:
        """Prepare; the model holds what was received."""

    def adjust(self) -> None:
        """Change the gradients in place."""

    def finish(self, session: Session) -> None:
        """Add to the reply, or store in the node's memory."""


def on_device(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> State:
    """The entries of `state` that `like` has, on its devices and in its dtypes."""
    return {name: state[name].to(like[name]) for name in like if name in state}
