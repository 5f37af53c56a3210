"""The BN layers of stacked clients, each in one call that takes all clients' channels side by side.

`torch.func.vmap` by itself normalizes them so, too, but scales and shifts them in two passes more, and in four on the
way back. Without this, a round takes 7 to 8 % longer with small-cnn and 17 % with resnet20 (10 clients, 5 steps). An
autograd function with a `vmap` of its own would be public, and lose in Python what that gains.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.layerwise.shared_batch_norm import SharedBatchNorm, Use
from fedbn_flwr.norm import bn_layers
from fedbn_flwr.simulation.stacked import batched
from fedbn_flwr.simulation.stacked.image_order import wrapped_images


@dataclass
class _StackedForward:
    """The forward of one BN layer for all clients at once."""

    layer: _BatchNorm

    def __call__(self, inputs: Tensor) -> Tensor:
        layer = self.layer
        moving = layer.training and layer.track_running_stats
        statistics = [layer.running_mean, layer.running_var] if moving or not layer.training else [None, None]
        own = [*statistics, layer.weight, layer.bias]
        values, dim = batched.unwrapped(inputs)
        if dim is None or not all(_is_stacked(value) for value in own):
            alone: Tensor = type(layer).forward(layer, inputs)
            return alone
        layer._check_input_dim(inputs)
        if moving and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        by_client = values.movedim(dim, 1)
        mean, variance, weight, bias = (_in_a_row(value) for value in own)
        of_batch, momentum = layer.training or mean is None, layer.momentum or 0.0
        outputs = F.batch_norm(by_client.flatten(1, 2), mean, variance, weight, bias, of_batch, momentum, layer.eps)
        return wrapped_images(outputs.view_as(by_client))


def _is_stacked(value: Tensor | None) -> bool:
    return value is None or batched.unwrapped(value)[1] is not None


def _in_a_row(value: Tensor | None) -> Tensor | None:
    """Return all clients' values one after the other: a view, because running statistics are updated in place."""
    if value is None:
        return None
    values, dim = batched.unwrapped(value)
    return values.movedim(dim or 0, 0).view(-1)


class StackedBatchNorm:
    """The BN layers of a model whose forward is torch's own, with a fixed momentum.

    (With `momentum=None` a layer averages over its steps, of which each client has a number of its own.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            layer
            for layer in bn_layers(model).values()
            if type(layer).forward is _BatchNorm.forward and layer.momentum is not None and batched.is_available()
        ]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Call each layer once for all clients, inside the block and inside `vmap`.

        A layer whose `forward` somebody else has replaced stays as it is.
        """
        layers = [layer for layer in self._layers if "forward" not in layer.__dict__]
        for layer in layers:
            # in the instance's own dictionary, where it comes before the class's `forward`
            layer.__dict__["forward"] = _StackedForward(layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]


@dataclass(frozen=True)
class _Stacked:
    """What an autograd function's `vmap` is told."""

    batch_size: int


def apply_shared(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, use: Use
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take a layer of all clients through `SharedBatchNorm`, inside `vmap`: what its `apply` does, in half the time.

    `vmap` takes .4 ms to find and prepare the function of a layer, which is a tenth of a carried ResNet-20 round.
    """
    if not batched.is_available():
        alone: tuple[Tensor, Tensor, Tensor, Tensor] = SharedBatchNorm.apply(inputs, weight, bias, eps, use)
        return alone
    values, dims = zip(*(_unwrapped(value) for value in (inputs, weight, bias)), strict=True)
    batch = _Stacked(values[0].shape[dims[0] or 0])
    rule: Callable[..., tuple[tuple[Tensor, ...], tuple[int | None, ...]]] = SharedBatchNorm.vmap
    with batched.outside_of_vmap():
        (outputs, mean, variance, count), _ = rule(batch, (*dims, None, None), *values, eps, use)
    return wrapped_images(outputs), batched.wrapped(mean, 0), batched.wrapped(variance, 0), count


def _unwrapped(value: Tensor | None) -> tuple[Tensor | None, int | None]:
    return (None, None) if value is None else batched.unwrapped(value)
