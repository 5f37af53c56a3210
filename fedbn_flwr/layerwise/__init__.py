"""Layer-wise steps: batch normalization over the mini-batches of all clients, in PyTorch and without Flower.

`SharedBatchNorm` is the one function that computes it, and asks the other clients through an `Exchange`;
`shared_statistics` puts it in the place of a model's BN layers while a step lasts. What stands behind the
exchange is the transport: `lockstep` (clients in one process), `SuspendedStep` (the answer may take days, and
come to another process), `Corrected` (sweeps: the answer is at hand). `gradients` puts them together.
"""

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
)
from fedbn_flwr.layerwise.gradients import gradients
from fedbn_flwr.layerwise.lockstep import lockstep
from fedbn_flwr.layerwise.shared_batch_norm import Mode, SharedBatchNorm, Use
from fedbn_flwr.layerwise.shared_statistics import shared_statistics
from fedbn_flwr.layerwise.step_cache import StepStore
from fedbn_flwr.layerwise.suspended_step import Abandoned, Done, Step, SuspendedStep
from fedbn_flwr.layerwise.sweeps import (
    Auto,
    Corrected,
    Corrections,
    Report,
    backward_sweep,
    correct,
    correction,
    forward_sweep,
    movement,
    pool,
    settle,
)
from fedbn_flwr.randomness import OwnRandomness

__all__ = [
    "Abandoned",
    "Answer",
    "Auto",
    "Corrected",
    "Corrections",
    "Done",
    "Exchange",
    "ExchangeError",
    "Kind",
    "Mode",
    "Observer",
    "OrderError",
    "OwnRandomness",
    "Report",
    "Request",
    "SharedBatchNorm",
    "Step",
    "StepStore",
    "SuspendedStep",
    "Use",
    "backward_sweep",
    "combine",
    "correct",
    "correction",
    "forward_sweep",
    "gradients",
    "lockstep",
    "movement",
    "pool",
    "respond",
    "settle",
    "shared_statistics",
]
