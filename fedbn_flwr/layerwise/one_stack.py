"""The exchange of clients that are one stack: there is nobody else to wait for."""

from collections.abc import Sequence

import torch

from fedbn_flwr.device import exact
from fedbn_flwr.layerwise.exchange import (
    Answer,
    Kind,
    Requests,
    surely_usable,
    to_shares,
    weighted,
)


class OneStackExchange:
    """Answers every request where it is asked, as `respond` does, without a word of the host's.

    It reads and writes the same tensors in every step, so that a captured step may ask it.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        place = exact(device)
        self._shares = torch.zeros(clients, dtype=torch.float64, device=place)
        self._usable = torch.ones((), dtype=torch.bool, device=place)
        #: by use of a layer, bytes of a client's request and of the answer, in the latest step that
        #: was not replayed, and in the present one
        self.sizes: dict[tuple[Kind, str], tuple[int, int]] = {}
        self._asked: dict[tuple[Kind, str], tuple[int, int]] = {}

    def begin(self, weights: Sequence[float]) -> None:
        """Begin a step of clients of these weights."""
        self._shares.copy_(torch.tensor(to_shares(weights), dtype=torch.float64))
        self._usable.fill_(True)
        self._asked = {}

    def __call__(self, requests: Requests) -> Answer:
        """Answer a request; whether its values can be pooled is known at the end of the step."""
        values = requests.tensor
        self._usable.logical_and_(surely_usable(requests.kind, values))
        answer = weighted(requests.kind, values, self._shares)
        self._asked[requests.kind, requests.layer] = (values[0].nbytes, answer.nbytes)
        return Answer(answer, sum(requests.counts))

    def end(self) -> None:
        """Raise if it is not sure that all values could be pooled: a step by messages finds out."""
        if not self._usable.cpu():
            raise RuntimeError("some client's statistics or gradients cannot surely be pooled")
        # a step that is replayed asks what it asked when it was captured
        self.sizes = self._asked or self.sizes
