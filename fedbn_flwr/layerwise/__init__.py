"""Layer-wise steps: batch normalization over the mini-batches of all clients, in PyTorch and without Flower.

The client: `SharedBatchNorm` normalizes one layer, and reaches the other clients through an `Exchange`;
`shared_statistics` puts it in the place of a model's BN layers while a step lasts. A `SuspendedStep` stops at each
exchange until its answer comes, which may take days. `Corrected` answers at once, by corrections from earlier rounds.

The server: `take_step` answers the exchanges of all clients, through a `LayerwiseStep`, which is the transport.
`Lockstep` is the transport for clients in one process, and `gradients` puts everything together there.
"""

from fedbn_flwr.layerwise.carried import Corrected, Corrections, carried_corrections, correct, correction
from fedbn_flwr.layerwise.exchange import (
    Answer,
    Exchange,
    ExchangeError,
    Kind,
    Observer,
    OrderError,
    Request,
    combine,
    respond,
    why_unusable,
)
from fedbn_flwr.layerwise.gradients import gradients
from fedbn_flwr.layerwise.lockstep import Lockstep, lockstep
from fedbn_flwr.layerwise.shared_batch_norm import Mode, SharedBatchNorm, Use
from fedbn_flwr.layerwise.shared_statistics import shared_statistics
from fedbn_flwr.layerwise.step_cache import StepCache
from fedbn_flwr.layerwise.suspended_step import Abandoned, Done, Step, SuspendedStep
from fedbn_flwr.layerwise.take_step import LayerwiseStep, take_step
from fedbn_flwr.randomness import OwnRandomness

__all__ = [
    "Abandoned",
    "Answer",
    "Corrected",
    "Corrections",
    "Done",
    "Exchange",
    "ExchangeError",
    "Kind",
    "LayerwiseStep",
    "Lockstep",
    "Mode",
    "Observer",
    "OrderError",
    "OwnRandomness",
    "Request",
    "SharedBatchNorm",
    "Step",
    "StepCache",
    "SuspendedStep",
    "Use",
    "carried_corrections",
    "combine",
    "correct",
    "correction",
    "gradients",
    "lockstep",
    "respond",
    "shared_statistics",
    "take_step",
    "why_unusable",
]
