"""The gradients of layer-wise steps, in one process and without Flower, and, slow and obvious, what
they must equal.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.diagnosis import replica
from fedbn_flwr.layerwise import Exchange, Mode, Observer, combine, lockstep, shared_statistics
from fedbn_flwr.layerwise.exchange import to_shares
from fedbn_flwr.norm import counter_keys, statistics_keys
from fedbn_flwr.randomness import derive

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]


def gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Sequence[float],
    loss_fn: Loss,
    mode: Mode = "fused",
    *,
    seed: int = 0,
    observe: Observer | None = None,
) -> list[Gradients]:
    """Return each client's gradients by parameter name; their weighted mean is FedTAN's gradient.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", algorithm 1,
    one iteration with E = 1. `mode` is "paper" (three exchanges a layer), "fused" (two, and the
    same numbers) or "forward" (one: in the backward pass, each client's own gradients;
    "forward-paper" takes two). One client, or clients with equal data, are plain BN.

    The model stays as it is, except that its running statistics move as those of centralized BN.
    Client i's dropout draws from a stream of (seed, i); `observe` sees every exchange.
    """
    shares, replicas = to_shares(weights), [replica(model) for _ in batches]
    steps = [
        partial(client_gradients, other, batch, loss_fn, mode)
        for other, batch in zip(replicas, batches, strict=True)
    ]
    results = lockstep(
        steps, shares, [derive(seed, "client", client) for client in range(len(steps))], observe
    )
    state, moved = model.state_dict(), [other.state_dict() for other in replicas]
    for key in statistics_keys(model):
        state[key].copy_(combine("mean", torch.stack([each[key] for each in moved]), shares))
    for key in counter_keys(model):
        state[key].copy_(moved[0][key])
    return results


def client_gradients(
    model: nn.Module, batch: Batch, loss_fn: Loss, mode: Mode, exchange: Exchange
) -> Gradients:
    """Return one client's gradients by parameter name."""
    learning = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    with shared_statistics(model, exchange, mode):
        loss = loss_fn(model(batch[0]), batch[1])
        values = torch.autograd.grad(loss, list(learning.values()), materialize_grads=True)
    return dict(zip(learning, values, strict=True))


class WeightedBatchNorm(nn.Module):
    """BN of the clients' mini-batches behind each other, in one graph: mean = sum_i p_i
    mean_i(x).
    """

    def __init__(self, layer: _BatchNorm, sizes: Sequence[int], weights: Sequence[float]) -> None:
        super().__init__()
        self.layer, self.sizes, self.weights = layer, list(sizes), list(weights)

    def forward(self, x: Tensor) -> Tensor:
        layer, axes = self.layer, (0, *range(2, x.dim()))
        clients = list(zip(self.weights, x.split(self.sizes), strict=True))
        mean = torch.stack([p * part.mean(axes, keepdim=True) for p, part in clients]).sum(0)
        squares = [p * (part - mean).square().mean(axes, keepdim=True) for p, part in clients]
        variance = torch.stack(squares).sum(0)
        if layer.training and layer.track_running_stats:
            n = x.numel() / x.shape[1]
            self.track(mean.detach().flatten(), variance.detach().flatten() * n / (n - 1))
        y = (x - mean) / (variance + layer.eps).sqrt()
        shape = mean.shape
        return y if layer.weight is None else y * layer.weight.view(shape) + layer.bias.view(shape)

    def track(self, mean: Tensor, unbiased: Tensor) -> None:
        layer = self.layer
        assert layer.running_mean is not None
        assert layer.running_var is not None
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked += 1
        f = 1 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.copy_((1 - f) * layer.running_mean + f * mean)
        layer.running_var.copy_((1 - f) * layer.running_var + f * unbiased)


def weighted_gradients(
    model: nn.Module, batches: Sequence[Batch], weights: Sequence[float]
) -> Gradients:
    """The gradient of sum_i p_i F_i under p-weighted BN; moves the model's running statistics."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    slow = copy.deepcopy(model, {id(t): t for t in [*model.parameters(), *model.buffers()]})
    sizes = [len(targets) for _, targets in batches]
    for name, layer in list(slow.named_modules()):
        if isinstance(layer, _BatchNorm):
            parent, _, child = name.rpartition(".")
            setattr(slow.get_submodule(parent), child, WeightedBatchNorm(layer, sizes, weights))
    outputs = slow(torch.cat([inputs for inputs, _ in batches])).split(sizes)
    losses = [
        F.cross_entropy(out, targets) for out, (_, targets) in zip(outputs, batches, strict=True)
    ]
    loss = torch.stack([p * each for p, each in zip(weights, losses, strict=True)]).sum()
    found = torch.autograd.grad(
        loss, list(learning.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(learning, found, strict=True))


def centralized_gradients(model: nn.Module, batches: Sequence[Batch]) -> Gradients:
    """PyTorch's own BN on the union of the mini-batches; moves the model's running statistics."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = F.cross_entropy(model(inputs), targets)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(learning, torch.autograd.grad(loss, list(learning.values())), strict=True))


def mean_gradient(gradients: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """What the server makes of the clients' gradients."""
    return {
        name: torch.stack([p * each[name] for p, each in zip(weights, gradients, strict=True)]).sum(
            0
        )
        for name in gradients[0]
    }


def relative_error(found: Gradients, wanted: Gradients) -> float:
    """|found - wanted| / |wanted|, over all parameters together."""
    assert list(found) == list(wanted)
    difference = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted])
    return float(difference.norm() / torch.cat([each.flatten() for each in wanted.values()]).norm())


def largest_difference(left: nn.Module, right: nn.Module) -> float:
    """Over all buffers."""
    pairs = zip(left.buffers(), right.buffers(), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs), default=0.0)


def heterogeneous_batches(sizes: Sequence[int], shape: Sequence[int], seed: int = 0) -> list[Batch]:
    """Two classes a client, and inputs whose mean and deviation differ from client to client."""
    generator = torch.Generator().manual_seed(seed)

    def batch(client: int, size: int) -> Batch:
        inputs = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
        targets = torch.randint(2, (size,), generator=generator) + 2 * client % 10
        return (1 + 0.5 * client) * inputs + 0.7 * client, targets

    return [batch(client, size) for client, size in enumerate(sizes)]


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A float64 model in training mode, but without dropout: centralized masks are other masks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double().train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()
    return model


def small_network(**options: Any) -> nn.Module:
    """Two convolutions, two BN layers with the options, any images of one channel."""
    return made(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4, **options),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4, **options),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 10),
        )
    )
