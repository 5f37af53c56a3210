"""Exact statistics: those of the new model, gathered from nodes in one exchange before it is
evaluated or kept.

Every asked node runs its training data through the model without learning, each BN layer
normalizing with the mini-batch, and reports count, mean and biased variance of what the layer saw.
With n_k values of a channel on node k, the server pools them, exactly:

    mean = sum n_k m_k / N,   var = sum n_k (v_k + (m_k - mean)^2) / N,   N = sum n_k

The model gets N / (N - 1) var, as in PyTorch. For one machine, Wu and Johnson, Rethinking "Batch"
in BatchNorm, 2021, call this precise BN.
"""

from collections.abc import Mapping
from dataclasses import replace
from logging import WARNING

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import why_unusable
from fedbn_flwr.norm import Moments
from fedbn_flwr.server.method_state import MethodState
from fedbn_flwr.server.pooling import Averager, Sent, name_dominant
from fedbn_flwr.server.replies import (
    CannotTrainError,
    Expected,
    RefusedError,
    log_refused,
    read_each,
)
from fedbn_flwr.server.round import Round
from fedbn_flwr.state import Arrays, arrays_of, arrays_to_record
from fedbn_flwr.wire.packed_moments import running_statistics, unpack_moments

#: what nodes send beside the model
GATHERED = Sent("gathered statistics")


def with_exact_statistics(
    arrays: ArrayRecord,
    models: Mapping[int, ArrayRecord],
    now: Round,
    averager: Averager,
    timeout: float,
    kept: MethodState,
) -> ArrayRecord:
    """Return a new state with statistics from these nodes, each of which gets its model.

    Nodes that fail are left out, and named in the log. An error says why if none has ever answered,
    though some train.
    """
    state = arrays_of(arrays)
    instruction = replace(now.instruction, gather=wire.STATISTICS)
    # all with moments of the same layers
    expected = Expected((), {}, groups=(wire.MOMENTS,))
    replies, refused = now.ask_pass(instruction, models, timeout, expected)
    sent = [(reply.node, reply.records[wire.MOMENTS]) for reply in replies]
    seen, unusable = read_each(sent, lambda _, arrays: _read_moments(arrays, state))
    refused += unusable
    if not seen and not kept.gathered and now.replies:
        raise CannotTrainError(
            f"no node could gather BN statistics: {next(iter(refused), 'none answered')}"
        )
    log_refused(refused)
    kept.gathered |= bool(seen)
    counts = {}
    for node, layers in seen.items():
        counts[node] = max(layer.count for layer in layers.values())
    name_dominant(counts, "gathered statistics")
    pooled = averager.unite(list(seen.values()), now.number)
    if not pooled:
        log(
            WARNING,
            "BN statistics stay as they were: there are no nodes' answers that could be pooled",
        )
    entries = running_statistics(pooled)
    gathered = {name: value.numpy().astype(state[name].dtype) for name, value in entries.items()}
    return arrays_to_record({**state, **gathered})


def _read_moments(arrays: Mapping[str, np.ndarray], state: Arrays) -> dict[str, Moments]:
    """Return a node's moments by layer; RefusedError if they cannot be pooled.

    Moments are in float64, but the pool becomes running statistics of the model, which may be in
    float32.
    """
    seen = unpack_moments(arrays)
    if not seen:
        raise RefusedError("it sent no moments")
    for layer, values in seen.items():
        entries = running_statistics({layer: values})
        own = [
            state[name]
            for name in entries
            if name in state and state[name].shape == entries[name].shape
        ]
        if len(own) < len(entries) or values.count < 1:
            raise RefusedError(f"its moments are not of a BN layer {layer!r} of the model")
        dtype: torch.dtype = getattr(torch, str(own[0].dtype))
        fault = why_unusable("statistics", torch.stack(list(entries.values())).to(dtype))
        if fault:
            raise RefusedError(f"the statistics of BN layer {layer!r} {fault.words}", fault.why)
    return seen
