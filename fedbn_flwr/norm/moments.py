"""Exact statistics of what every BN layer sees: gathered, pooled over clients, and put into a model
for a new site.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.device import where_exact
from fedbn_flwr.norm.detect import bn_layers, keeps_statistics, lacks
from fedbn_flwr.norm.layers import HybridBatchNorm

#: inputs below which `adapt` warns
FEWEST = 20


@dataclass(frozen=True)
class Moments:
    """Count, mean and biased variance of a layer's inputs (as hybrid BN mixes them), by channel, in
    float64.
    """

    count: int
    mean: Tensor
    variance: Tensor

    def running_variance(self, unbiased: bool) -> Tensor:
        """Return the value of a running variance: torch corrects the batch's by n / (n - 1)."""
        if unbiased and self.count > 1:
            return self.variance * (self.count / (self.count - 1))
        return self.variance


def gather_moments(
    model: nn.Module, batches: Iterable[Tensor], training: bool = True
) -> dict[str, Moments]:
    """Run batches of inputs through the model, and return the moments of every BN layer's inputs,
    by name.

    Every BN layer normalizes as it does in training, or in evaluation; nothing is learned, and the
    model is left as it was, running statistics, counters and modes included. What is not BN is in
    eval mode, so that dropout neither draws random numbers nor widens the variances, which are for
    evaluation.
    """
    with torch.no_grad(), gathering(model, training) as seen:
        for batch in batches:
            model(batch)
    return seen


@contextmanager
def only_training(model: nn.Module, layers: Iterable[nn.Module] = ()) -> Iterator[None]:
    """While open, these layers are in training mode, and all others in evaluation mode."""
    modes = {layer: layer.training for layer in model.modules()}
    training = set(layers)
    try:
        # Modes are set directly: `train()` of a frozen layer would not change it, and would
        # remember the call.
        for layer in modes:
            layer.training = layer in training
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


@contextmanager
def gathering(model: nn.Module, training: bool = True) -> Iterator[dict[str, Moments]]:
    """While open, fill the yielded dictionary with the moments that `gather_moments` returns, from
    any call of the model.
    """
    seen: dict[str, Moments] = {}
    # the others normalize with the statistics that they keep
    moving = {
        name: layer
        for name, layer in bn_layers(model).items()
        if not (training and keeps_statistics(layer))
    }
    names: dict[nn.Module, str] = {layer: name for name, layer in moving.items()}
    kept = [(buffer, buffer.clone()) for layer in names for buffer in layer.buffers()]

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer.training = training  # the code that runs the model may have asked for another mode
        # by rows, one a channel: a third less time than `var_mean` over the other axes (small-cnn
        # on one core)
        rows = where_exact(inputs[0]).transpose(0, 1).flatten(1).double()
        if isinstance(layer, HybridBatchNorm):
            mean, variance = (
                where_exact(mixed).double() for mixed in layer.mixed_statistics(inputs[0])
            )
        else:
            mean = rows.mean(1)
            variance = torch.linalg.vector_norm(rows - mean[:, None], dim=1) ** 2 / rows.shape[1]
        moments = Moments(rows.shape[1], mean, variance)
        name = names[layer]
        if name in seen:
            seen[name] = _merge(seen[name], moments)
        else:
            seen[name] = moments

    handles = [layer.register_forward_pre_hook(record) for layer in names]
    in_training: list[nn.Module] = []
    if training:
        in_training = list(names)
    try:
        with only_training(model, in_training):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in kept:
            buffer.copy_(value)


def pool_moments(records: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """The moments of all records' inputs together: exactly those of the concatenated inputs."""
    pooled: dict[str, Moments] = {}
    for record in records:
        for name, moments in record.items():
            if name in pooled:
                pooled[name] = _merge(pooled[name], moments)
            else:
                pooled[name] = moments
    return pooled


def adapt(
    model: nn.Module,
    inputs: Tensor | Iterable[Any],
    weight: float = 1.0,
    preprocess: Callable[[Tensor], Tensor] = lambda inputs: inputs,
) -> nn.Module:
    """Return a copy of a model with the BN statistics of unlabeled inputs; nothing else differs.

    `inputs` are a tensor, or batches of any sizes: tensors, pairs that begin with one, or
    dictionaries, of which the first tensor with more than one dimension counts, as training had
    them or as `preprocess` makes them. All are kept in memory, and the layers' outputs of one
    batch. The statistics are those of one forward pass in training mode over all inputs together,
    with dropout off: each layer sees what the layers before it have normalized with their new
    statistics, as in the model that is returned. So one batch goes through the model once, and
    several do once for each layer: the same, in less memory and more time, where no layer is used
    twice.

    A `weight` below 1 mixes (1 - weight) of the model's statistics with the new ones. n / (n + N)
    with n inputs counts the model's as N samples (Schneider et al., NeurIPS 2020). A model without
    running statistics is a ValueError, and so are inputs that are not finite.
    """
    lacking = lacks(model, "statistics", in_training=False)
    if lacking:
        raise ValueError(f"adapt re-estimates BN's running statistics: {lacking}")
    if not 0 < weight <= 1:
        raise ValueError(f"adapt: weight must be above 0 and at most 1, got {weight}")
    with torch.random.fork_rng(devices=[]):  # a loader draws from torch's generator
        given = [inputs] if isinstance(inputs, Tensor) else inputs
        batches = [preprocess(_inputs_of(batch)) for batch in given]
    # a model that diverges may be adapted: a run goes on with the score that it has then
    if not all(batch.isfinite().all() for batch in batches):
        raise ValueError("adapt: the inputs are not finite")
    count = sum(map(len, batches))
    if count < FEWEST:
        if not count:
            raise ValueError("adapt: there are no inputs")
        warnings.warn(
            f"adapt: statistics of {count} inputs are noisy: give {FEWEST} or more", stacklevel=2
        )
    adapted = deepcopy(model)
    known = dict[str, Moments]()
    before = bn_layers(model)
    after = bn_layers(adapted)

    def put(name: str, moments: Moments, unbiased: bool) -> None:
        if moments.count == 1:
            raise ValueError(
                f"adapt: BN layer {name!r} sees one value per channel: give more inputs"
            )
        known[name] = moments
        for entry, value in (
            ("running_mean", moments.mean),
            ("running_var", moments.running_variance(unbiased)),
        ):
            old = getattr(before[name], entry)
            if old is not None:
                getattr(after[name], entry).copy_(
                    torch.lerp(where_exact(old).double(), value, weight)
                )

    is_whole = len(batches) == 1
    for place in range(1 if is_whole else len(after)):
        with torch.no_grad(), gathering(adapted, training=False) as seen:
            hooks = []
            if is_whole:  # of one batch, a layer has all inputs when the pass comes to it
                hooks = [
                    layer.register_forward_pre_hook(
                        lambda *_, name=name: put(name, seen[name], unbiased=False)
                    )
                    for name, layer in after.items()
                ]
            for batch in batches:
                adapted(batch)
        for hook in hooks:
            hook.remove()
        for name in [*seen][place : place + 1]:  # in the order of the forward pass
            put(name, seen[name], unbiased=False)  # as in training; evaluation has the unbiased one
    for name, moments in known.items():
        put(name, moments, unbiased=True)
    return adapted


def inputs_in(batch: Any) -> Any:
    """Return what may be the inputs of a batch: the batch, the first of a pair, or of a dictionary
    the first tensor with more than one dimension, since labels have one.
    """
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    if isinstance(batch, Mapping):
        for value in batch.values():
            if isinstance(value, Tensor) and value.dim() > 1:
                return value
    return batch


def _inputs_of(batch: Any) -> Tensor:
    inputs = inputs_in(batch)
    if not isinstance(inputs, Tensor):
        able = "a tensor, a pair that begins with one, or a dictionary with one"
        raise ValueError(f"adapt: a batch must be {able}, got {type(batch).__name__}")
    return inputs


def _merge(one: Moments, other: Moments) -> Moments:
    # Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Sample Variances",
    # 1979.
    count = one.count + other.count
    shift = other.mean - one.mean
    share = other.count / count
    mean = one.mean + shift * share
    variance = one.variance * (1 - share) + other.variance * share + shift**2 * share * (1 - share)
    return Moments(count, mean, variance)
