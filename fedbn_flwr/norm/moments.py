"""Gathering exact statistics of what every BN layer sees, and pooling them over clients."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbn_flwr.device import where_exact
from fedbn_flwr.norm.detect import bn_layers
from fedbn_flwr.norm.layers import HybridBatchNorm


@dataclass(frozen=True)
class Moments:
    """Count, mean and biased variance of a layer's inputs (as hybrid BN mixes them), by channel, in float64."""

    count: int
    mean: Tensor
    variance: Tensor

    def running_variance(self, unbiased: bool) -> Tensor:
        """Return the value of a running variance: torch corrects the batch's by n / (n - 1)."""
        return self.variance * (self.count / (self.count - 1)) if unbiased and self.count > 1 else self.variance


def gather(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Moments]:
    """Run batches of inputs through the model, and return the moments of every BN layer's inputs, by name.

    Every BN layer normalizes as it does in training; nothing is learned, and the model is left as it was, running
    statistics, counters and modes included. What is not BN is in eval mode, so that dropout neither draws random
    numbers nor widens the variances, which are for evaluation.
    """
    with torch.no_grad(), gathering(model) as seen:
        for batch in batches:
            model(batch)
    return seen


@contextmanager
def gathering(model: nn.Module) -> Iterator[dict[str, Moments]]:
    """While open, fill what is yielded with the moments that `gather` returns, whoever runs the model."""
    seen: dict[str, Moments] = {}
    names: dict[nn.Module, str] = {layer: name for name, layer in bn_layers(model).items()}
    modes = {layer: layer.training for layer in model.modules()}
    kept = [(buffer, buffer.clone()) for layer in names for buffer in layer.buffers()]

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer.training = True  # whoever runs the model may have asked for another mode
        # by rows, one a channel: a third less time than `var_mean` over the other axes (small-cnn on one core)
        rows = where_exact(inputs[0]).transpose(0, 1).flatten(1).double()
        if isinstance(layer, HybridBatchNorm):
            mean, variance = (where_exact(mixed).double() for mixed in layer.mixed_statistics(inputs[0]))
        else:
            mean = rows.mean(1)
            variance = torch.linalg.vector_norm(rows - mean[:, None], dim=1) ** 2 / rows.shape[1]
        moments = Moments(rows.shape[1], mean, variance)
        name = names[layer]
        seen[name] = _merge(seen[name], moments) if name in seen else moments

    handles = [layer.register_forward_pre_hook(record) for layer in names]
    try:
        # Modes are set directly: `train()` of a frozen layer would not change it, and would remember the call.
        for layer in modes:
            layer.training = layer in names
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for layer, mode in modes.items():
            layer.training = mode
        for buffer, value in kept:
            buffer.copy_(value)


def pool(records: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """The moments of all records' inputs together: exactly those of the concatenated inputs."""
    pooled: dict[str, Moments] = {}
    for record in records:
        for name, moments in record.items():
            pooled[name] = _merge(pooled[name], moments) if name in pooled else moments
    return pooled


def _merge(one: Moments, other: Moments) -> Moments:
    # Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Sample Variances", 1979.
    count = one.count + other.count
    shift = other.mean - one.mean
    share = other.count / count
    mean = one.mean + shift * share
    variance = one.variance * (1 - share) + other.variance * share + shift**2 * share * (1 - share)
    return Moments(count, mean, variance)
