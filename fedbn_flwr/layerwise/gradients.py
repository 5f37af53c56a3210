"""The gradients of all clients in a layer-wise step, in one process and without Flower."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedbn_flwr.layerwise.exchange import Exchange, Observer, combine, normalized
from fedbn_flwr.layerwise.shared_batch_norm import Mode
from fedbn_flwr.layerwise.shared_statistics import shared_statistics
from fedbn_flwr.layerwise.take_step import lockstep
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
    exchange: Mode = "fused",
    *,
    seed: int = 0,
    observe: Observer | None = None,
) -> list[Gradients]:
    """Return each client's gradients by parameter name; their weighted mean is FedTAN's gradient.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", algorithm 1, one
    iteration with E = 1. `exchange` is "paper" (three exchanges a layer), "fused" (two, and the same numbers)
    or "forward" (one: in the backward pass, each client's own gradients; "forward-paper" takes two). One client,
    or clients with equal data, are plain BN.

    The model stays as it is, except that its running statistics move as those of centralized BN. Client i's
    dropout draws from a stream of (seed, i); `observe` sees every exchange.
    """
    shares = normalized(weights)
    clients = [
        _Client(_replica(model), batch, loss_fn, derive(seed, "client", client)) for client, batch in enumerate(batches)
    ]
    steps = [partial(client.step, mode=exchange) for client in clients]
    results = lockstep(steps, shares, [client.seed for client in clients], observe)
    _move_running_statistics(model, [client.model for client in clients], shares)
    return results


@dataclass(frozen=True)
class _Client:
    model: nn.Module
    batch: Batch
    loss_fn: LossFunction
    seed: int

    def loss(self) -> Tensor:
        inputs, targets = self.batch
        return self.loss_fn(self.model(inputs), targets)

    def step(self, exchange: Exchange, mode: Mode = "fused") -> Gradients:
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with shared_statistics(self.model, exchange, mode):
            values = torch.autograd.grad(self.loss(), list(learning.values()), materialize_grads=True)
        return dict(zip(learning, values, strict=True))


def _replica(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters, and has buffers of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _move_running_statistics(model: nn.Module, replicas: Sequence[nn.Module], shares: Sequence[float]) -> None:
    state, moved = model.state_dict(), [replica.state_dict() for replica in replicas]
    for key in statistics_keys(model):
        state[key].copy_(combine("mean", torch.stack([each[key] for each in moved]), shares))
    for key in counter_keys(model):
        state[key].copy_(moved[0][key])
