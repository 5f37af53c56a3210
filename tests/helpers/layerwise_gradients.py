"""The gradients of all clients in a layer-wise step, in one process and without Flower."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedbn_flwr.diagnosis import replica
from fedbn_flwr.layerwise import Exchange, Mode, Observer, combine, lockstep, shared_statistics
from fedbn_flwr.layerwise.exchange import normalized
from fedbn_flwr.norm import counter_keys, statistics_keys
from fedbn_flwr.randomness import derive

Batch = tuple[Tensor, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor]


def gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Sequence[float],
    loss_fn: LossFunction,
    mode: Mode = "fused",
    *,
    seed: int = 0,
    observe: Observer | None = None,
) -> list[Gradients]:
    """Return each client's gradients by parameter name; their weighted mean is FedTAN's gradient.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", algorithm 1, one
    iteration with E = 1. `mode` is "paper" (three exchanges a layer), "fused" (two, and the same numbers)
    or "forward" (one: in the backward pass, each client's own gradients; "forward-paper" takes two). One client,
    or clients with equal data, are plain BN.

    The model stays as it is, except that its running statistics move as those of centralized BN. Client i's
    dropout draws from a stream of (seed, i); `observe` sees every exchange.
    """
    shares, replicas = normalized(weights), [replica(model) for _ in batches]
    steps = [
        partial(client_gradients, other, batch, loss_fn, mode) for other, batch in zip(replicas, batches, strict=True)
    ]
    results = lockstep(steps, shares, [derive(seed, "client", client) for client in range(len(steps))], observe)
    state, moved = model.state_dict(), [other.state_dict() for other in replicas]
    for key in statistics_keys(model):
        state[key].copy_(combine("mean", torch.stack([each[key] for each in moved]), shares))
    for key in counter_keys(model):
        state[key].copy_(moved[0][key])
    return results


def client_gradients(
    model: nn.Module, batch: Batch, loss_fn: LossFunction, mode: Mode, exchange: Exchange
) -> Gradients:
    """Return one client's gradients by parameter name."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with shared_statistics(model, exchange, mode):
        loss = loss_fn(model(batch[0]), batch[1])
        values = torch.autograd.grad(loss, list(learning.values()), materialize_grads=True)
    return dict(zip(learning, values, strict=True))
