"""How the exchanges of a layer-wise step reach Flower's nodes: each carrier's two ends lie side by
side.

- `message_*.py`: any nodes, by Flower's messages, with steps that are suspended and replayed in
  between,
- `side_channel_*.py`: carries the same messages to nodes that run at the same time, over one gRPC
  stream each.

Nodes in worker processes, and stacked nodes of this process, have theirs beside their grids in
`fedbn_flwr.simulation`. Below is what all transports have in common: the nodes of a step, and the
failures that name them. The exchanges themselves, and the loop that answers them, are in
`fedbn_flwr.layerwise`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flwr.app import Message

from fedbn_flwr.layerwise import Transport

if TYPE_CHECKING:  # a node's process does without the server's room
    from flwr.serverapp import Grid

    from fedbn_flwr.server.replies import Refusal


@dataclass(frozen=True, order=True)
class Participant:
    """A node that takes part in a layer-wise step.

    Participants are ordered by partition, as replies are.
    """

    partition: int
    node: int
    num_examples: float


class NodesTransport(Transport[Message], Protocol):
    """The transport of nodes in a layer-wise step; their replies are those to training messages."""

    @property
    def participants(self) -> Sequence[Participant]:
        """The nodes in the order of their rows, which is that of their partitions.

        They are known when the first requests are.
        """


def open_step(grid: "Grid", messages: Sequence[Message]) -> NodesTransport | None:
    """Open the step that these messages begin, one message a node; None if the grid, or one behind
    it, cannot.

    A grid that can has a method `open_step`. The nodes may go to their first exchange at once.
    Where None is returned, or the step fails, they are as before, and the same step can be taken by
    messages.
    """
    opened: NodesTransport | None = getattr(grid, "open_step", lambda _: None)(messages)
    return opened


def is_unable(error: Exception) -> bool:
    """Whether a step failed because it cannot be taken in this way: torch says so by a
    RuntimeError, as engines do.
    """
    unable: bool = getattr(error, "unable", isinstance(error, RuntimeError))
    return unable


class NodesFailedError(RuntimeError):
    """Nodes failed in the middle of a step."""

    def __init__(self, nodes: Collection[int], reasons: "Iterable[Refusal]") -> None:
        self.nodes = frozenset(nodes)
        self.reasons = list(reasons)
        super().__init__("; ".join(map(str, self.reasons)))
