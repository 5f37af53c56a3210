"""What a client answers to a message, before it is packed."""

from dataclasses import dataclass, field
from typing import Any

from fedbn_flwr.state import State

#: numbers that a client measured, by name
Metrics = dict[str, float | list[float]]


@dataclass
class Reply:
    """Everything that leaves the client: named groups of arrays, numbers, and the binding keys that
    were obeyed.

    The reply owns its tensors: nothing changes them any more.
    """

    #: None where the metrics say it, as far as they do
    num_examples: int | None
    metrics: Metrics
    records: dict[str, State] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
