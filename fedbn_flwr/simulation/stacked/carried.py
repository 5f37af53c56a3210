"""The first step of stacked clients under corrections that each of them received."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.rules import Session
from fedbn_flwr.layerwise import Answer, Corrected, Corrections
from fedbn_flwr.simulation.stacked.model import Rows
from fedbn_flwr.state import State
from fedbn_flwr.wire.carried import CORRECTIONS, pack_values, read_corrections


class StackedCorrections:
    """The corrections of all clients of a stack, whose first mini-batches may have different sizes.

    Clients with equal sizes are a part, and go through the model together, one part after another.
    """

    def __init__(self, received: State, clients: int) -> None:
        self._statistics, self._gradients = read_corrections(received)
        self._clients = clients
        self._parts: list[tuple[Rows, Corrected]] = []

    @classmethod
    def of(cls, session: Session, clients: int) -> Self | None:
        """Return the received corrections; None if the instruction asks for none."""
        if session.instruction.layerwise not in wire.CARRIED_MODES:
            return None
        return cls(session.received.get(wire.CARRIED, {}), clients)

    def exchange(self, rows: Rows) -> Corrected:
        """Return the exchange of the clients in these rows."""
        exchange = Corrected(_chosen(self._statistics, rows), _chosen(self._gradients, rows))
        self._parts.append((rows, exchange))
        return exchange

    def records(self) -> dict[str, State]:
        """Return the group of the replies with the clients' local values, stacked, after the step."""
        whole: dict[str, Tensor] = {}
        for rows, exchange in self._parts:
            values = pack_values(exchange.requests)
            for name, value in values.items():
                # a part's layers and their sizes are common to its clients
                shape = value.shape[1:] if name in CORRECTIONS else value.shape
                whole.setdefault(name, torch.empty(self._clients, *shape, dtype=value.dtype, device=value.device))
                whole[name][rows] = value
        return {wire.CARRIED: whole} if whole else {}


def _chosen(corrections: Mapping[str, Answer], rows: Rows) -> Corrections:
    return {layer: Answer(answer.tensor[rows], answer.count) for layer, answer in corrections.items()}
