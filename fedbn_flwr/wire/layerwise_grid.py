"""The protocol of a grid that takes nodes through a layer-wise step without messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flwr.app import Message

from fedbn_flwr.layerwise import Transport


@dataclass(frozen=True, order=True)
class Participant:
    """A node that takes part in a layer-wise step. Participants are ordered by partition, as replies are."""

    partition: int
    node: int
    num_examples: float


class NodesStep(Transport[Message], Protocol):
    """A layer-wise step of nodes, whose replies are those to training messages."""

    @property
    def participants(self) -> Sequence[Participant]:
        """The nodes in the order of their requests, which is that of their partitions.

        They are known when the first requests are.
        """


@runtime_checkable
class LayerwiseGrid(Protocol):
    """A grid that can take nodes through a layer-wise step without messages."""

    def open_step(self, messages: Sequence[Message]) -> NodesStep | None:
        """Open the step that these messages begin, one message a node; None if not all nodes can take it so.

        The nodes may go to their first exchange at once. Where None is returned, or the step fails, they are as before,
        and the same step can be taken by messages.
        """
