"""A client that lies, for tests of `robust`: a grid that changes what the server gets from the
client.
"""

from typing import Any

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Requests
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.server.pooling import is_floating
from fedbn_flwr.state import arrays_to_record, view_arrays
from fedbn_flwr.state.records import array_records
from fedbn_flwr.transports.message_records import REQUEST, read_request

#: the partition of the client that lies
LIAR = 0


class LyingGrid(PassingGrid):
    """A grid of messages, one of whose clients sends `factor` times its numbers: large or negated,
    but plausible.

    The numbers are its model, carried values, control variates, gathered moments, and what it sends
    in exchanges. Variances keep their sign, because negative ones would be refused. Counters,
    metrics and evaluations are true.
    """

    def __init__(self, grid: Grid, factor: float) -> None:
        super().__init__(grid)
        self._factor = factor

    def incoming(self, replies: list[Message]) -> list[Message]:
        """Return the replies, with the client's lies."""
        return [lie(reply, self._factor) for reply in replies]


def lie(reply: Message, factor: float) -> Message:
    """Multiply the numbers of the liar's reply to training messages, in place, and return the
    reply.
    """
    is_training = reply.metadata.message_type.partition(".")[0] == MessageType.TRAIN
    if not (is_training and reply.has_content()):
        return reply
    if not any(
        metrics.get(wire.PARTITION_ID) == LIAR for metrics in reply.content.metric_records.values()
    ):
        return reply
    for group, arrays in array_records(reply.content).items():
        if group == REQUEST:
            request = read_request(reply.content)
            lies = {request.layer: _scaled_rows(request, factor)[0].numpy(force=True)}
        else:
            lies = {
                name: _scaled(name, array, factor) for name, array in view_arrays(arrays).items()
            }
        reply.content[group] = arrays_to_record(lies)
    return reply


def _scaled_rows(requests: Requests, factor: float) -> torch.Tensor:
    """Return `factor` times the clients' values; variances keep their sign."""
    lies = requests.tensor * factor
    if requests.kind == "variance":
        return lies.abs()
    if requests.kind == "statistics":
        lies[:, 1].abs_()
    return lies


def _scaled(name: str, array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Return `factor` times an entry that is neither a counter nor a variance."""
    if not is_floating(array) or name.endswith("/count"):
        return array
    lies: NDArray[Any] = np.asarray(array * factor, array.dtype)
    if name.endswith(("running_var", "/variance")):
        np.abs(lies, out=lies)
    if name == "statistics":
        np.abs(lies[1], out=lies[1])
    return lies
