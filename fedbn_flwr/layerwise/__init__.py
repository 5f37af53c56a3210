"""Layer-wise steps: batch normalization over the mini-batches of all clients, in PyTorch and
without Flower.

The client: `SharedBatchNorm` normalizes one layer, and reaches the other clients through an
`Exchange`; `shared_statistics` puts it in the place of a model's BN layers while a step lasts. A
`SuspendedStep` stops at each exchange until its answer comes. `CorrectedClients` in `carried.py`
answers at once, by corrections from earlier rounds.

The server: `take_step` answers the exchanges of all clients, which a `Transport` brings as batches
of `Requests`. `lockstep` takes clients of this process through a step. Transports of Flower's nodes
are in `fedbn_flwr.transports`.
"""

from fedbn_flwr.layerwise.exchange import (
    Answer,
    Exchange,
    Kind,
    Observer,
    Requests,
    combine,
    respond,
)
from fedbn_flwr.layerwise.shared_batch_norm import Mode, SharedBatchNorm
from fedbn_flwr.layerwise.shared_statistics import shared_statistics
from fedbn_flwr.layerwise.steps import SuspendedStep, Transport, lockstep, take_step

__all__ = [
    "Answer",
    "Exchange",
    "Kind",
    "Mode",
    "Observer",
    "Requests",
    "SharedBatchNorm",
    "SuspendedStep",
    "Transport",
    "combine",
    "lockstep",
    "respond",
    "shared_statistics",
    "take_step",
]
