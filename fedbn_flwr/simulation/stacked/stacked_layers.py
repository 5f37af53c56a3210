"""The layers of stacked clients inside `torch.func.vmap`: BN in one call, images channels last,
dropout by client.

`vmap` by itself would compute the same, slower (docs/benchmarks.md, "Choices in the code"). It
hides the dimension for the clients, and the functions of torch that show it are private: a version
of torch may not have them. Without them a model is left as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedbn_flwr.client.image_order import ANY_ORDER
from fedbn_flwr.layerwise.shared_batch_norm import SharedBatchNorm, Use
from fedbn_flwr.norm.detect import after_norm, replaced_forwards
from fedbn_flwr.randomness import OwnRandomness

try:
    from torch._C import _functorch
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as outside_of_vmap
except ImportError:
    _functorch = None  # type: ignore[assignment]

#: torch's private functions that are called here
NEEDED = ("maybe_current_level", "_unwrap_batched", "_add_batch_dim")
#: layers that multiply their inputs by a random mask
_MASKING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
OTHER_CALLS = "dropout layers are called in another way than in the step before"
#: a dropout layer, and the form of one client's inputs to it
Called = tuple[_DropoutNd, Tensor]


def is_available() -> bool:
    """Whether torch has these functions; without them `vmap` does what it does by itself."""
    return all(hasattr(_functorch, name) for name in NEEDED)


def unwrapped(value: Tensor) -> tuple[Tensor, int | None]:
    """Return the tensor of all clients and its dimension for them, None for one that is the same
    for all.
    """
    values: tuple[Tensor, int | None] = _functorch._unwrap_batched(value, _level())
    return values


def wrapped(values: Tensor, dim: int) -> Tensor:
    """Return a tensor of all clients as that of one."""
    return _functorch._add_batch_dim(values, dim, _level())


def _level() -> int:
    return _functorch.maybe_current_level() or 0


class CannotStackError(RuntimeError):
    """Says why these clients must train one after another."""


class StackedLayers:
    """The layers of a model that are called once for all clients, inside `vmap`, and the order of
    its images.

    They are BN, with what timm puts behind it, and dropout. Other layers that draw at random are
    refused by `vmap`.

    On a CPU, grouped convolutions and BN are mostly faster where the channels of all clients lie
    side by side. Only chains of torch's own layers are put into this order: a forward of a model's
    own may need the usual one, and other normalizers put images back into it. Pools and sums over
    positions have gradients in the usual order; an activation whose gradient is in another order
    than its output is slow, and hands that order on.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = []
        if is_available():
            layers = list(model.modules())
        batch_norm = [layer for layer in layers if isinstance(layer, _BatchNorm)]
        self._batch_norm = {layer: behind for layer in batch_norm if (behind := after_norm(layer))}
        dropouts = [
            layer for layer in layers if isinstance(layer, _DropoutNd) and type(layer) in _MASKING
        ]
        self._dropouts = [layer for layer in dropouts if layer.p > 0]
        kinds = {type(layer) for layer in layers}
        self._channels_last = nn.Conv2d in kinds and kinds <= ANY_ORDER
        chain = layers if self._channels_last else []
        self._activations = [layer for layer in chain if isinstance(layer, nn.ReLU | nn.ReLU6)]
        pools = [layer for layer in chain if isinstance(layer, nn.AdaptiveAvgPool2d)]
        self._pools = [layer for layer in pools if layer.output_size in (1, (1, 1))]
        #: by the form of a batch, what dropout layers were called with in a step, one after another
        self._called: dict[torch.Size, list[Called]] = {}

    def images(self, images: Tensor) -> Tensor:
        """Return (clients, batch, C, H, W) so that `vmap` makes of them images of one network,
        channels last.
        """
        if not (self._channels_last and images.dim() == 5 and images.device.type == "cpu"):
            return images
        return images.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)

    def draw_masks(self, inputs: Tensor, streams: Sequence[OwnRandomness]) -> list[Tensor]:
        """Draw the masks of a step on such inputs ahead of it; none if it is the first one."""
        return [
            _draw(layer, torch.ones_like(row, device=inputs.device), streams)
            for layer, row in self._called.get(inputs.shape, ())
        ]

    @contextmanager
    def used(
        self,
        streams: Sequence[OwnRandomness] = (),
        masks: Sequence[Tensor] = (),
        form: torch.Size = torch.Size(),  # noqa: B008
    ) -> Iterator[None]:
        """Call each layer once for all clients.

        Dropout takes its masks from those that were drawn ahead, or draws the mask of row i of its
        inputs from stream i. `form` is that of the batch.

        A layer whose `forward` somebody else has replaced stays as it is.
        """
        dropout = _Dropout(streams)
        if masks:
            layers = [layer for layer, _ in self._called[form]]
            dropout.ahead = zip(layers, masks, strict=True)
        forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {
            **{
                layer: partial(_normalized, layer, behind)
                for layer, behind in self._batch_norm.items()
            },
            **{
                layer: partial(_dropped, layer, dropout)
                for layer in self._dropouts
                if layer.training
            },
            # a pool's own forward would loop over the clients, and warn of it
            **dict.fromkeys(self._pools, _mean),
        }
        usual = {
            layer: forward for layer, forward in forwards.items() if "forward" not in layer.__dict__
        }
        with replaced_forwards(usual), ExitStack() as hooks:
            for layer in self._activations:
                hooks.callback(layer.register_forward_hook(_keep_order).remove)
            yield
        dropout.end()
        if dropout.called:
            self._called[form] = dropout.called


# ---- batch normalization -------------------------------------------------------------------------


def _normalized(layer: _BatchNorm, behind: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Take all clients through one BN layer at once: one call that takes their channels side by
    side.
    """
    moving = layer.training and layer.track_running_stats
    if moving and layer.momentum is None:
        raise CannotStackError(
            "BN with momentum=None averages over steps that each client counts for itself"
        )
    if moving or not layer.training:
        statistics = [layer.running_mean, layer.running_var]
    else:
        statistics = [None, None]
    entries = [*statistics, layer.weight, layer.bias]
    values, dim = (inputs, None) if layer.momentum is None else unwrapped(inputs)
    if dim is None or not all(
        value is None or unwrapped(value)[1] is not None for value in entries
    ):
        alone: Tensor = type(layer).forward(layer, inputs)
        return alone
    layer._check_input_dim(inputs)
    if moving and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    by_client = values.movedim(dim, 1)
    mean, variance, weight, bias = (_in_a_row(value) for value in entries)
    of_batch = layer.training or mean is None
    momentum = layer.momentum or 0.0
    outputs = F.batch_norm(
        by_client.flatten(1, 2), mean, variance, weight, bias, of_batch, momentum, layer.eps
    )
    return behind(wrapped_images(outputs.view_as(by_client)))


def _in_a_row(value: Tensor | None) -> Tensor | None:
    """Return all clients' values one after the other: a view, because running statistics are
    updated in place.
    """
    if value is None:
        return None
    values, dim = unwrapped(value)
    return values.movedim(dim or 0, 0).view(-1)


@dataclass(frozen=True)
class _Stacked:
    """What an autograd function's `vmap` is told."""

    batch_size: int


def apply_shared(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, use: Use
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take a layer of all clients through `SharedBatchNorm`, inside `vmap`.

    Its `apply` does the same, in twice the time, most of which `vmap` takes to find and prepare the
    function.
    """
    if not is_available():
        alone: tuple[Tensor, Tensor, Tensor, Tensor] = SharedBatchNorm.apply(
            inputs, weight, bias, eps, use
        )
        return alone
    parts = [
        (None, None) if value is None else unwrapped(value) for value in (inputs, weight, bias)
    ]
    values, dims = zip(*parts, strict=True)
    batch = _Stacked(values[0].shape[dims[0] or 0])
    rule: Callable[..., tuple[tuple[Tensor, ...], tuple[int | None, ...]]] = SharedBatchNorm.vmap
    with outside_of_vmap():
        (outputs, mean, variance, count), _ = rule(batch, (*dims, None, None), *values, eps, use)
    return wrapped_images(outputs), wrapped(mean, 0), wrapped(variance, 0), count


# ---- the order of images -------------------------------------------------------------------------


def wrapped_images(images: Tensor) -> Tensor:
    """Return (batch, clients, ...), what a layer put out for all clients, as the output for one.

    If channels are last, as a copy: the gradient of a ReLU that changes a view in place would be
    handed on in the usual order.
    """
    if _are_channels_last(images):
        return wrapped(images.movedim(1, 0).clone(), 0)
    return wrapped(images, 1)


def _are_channels_last(images: Tensor) -> bool:
    return images.dim() == 5 and images.stride(-3) < images.stride(-1)


def _keep_order(_: nn.Module, __: Any, outputs: Tensor) -> None:
    """See to it that the gradient of an activation's outputs comes in their order."""
    values, _dim = unwrapped(outputs)
    if values.requires_grad and _are_channels_last(values):
        values.register_hook(partial(_in_order, values.stride()))


def _mean(images: Tensor) -> Tensor:
    return images.mean((-2, -1), keepdim=True)


def _in_order(strides: Sequence[int], gradient: Tensor) -> Tensor:
    if gradient.stride() == strides:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


# ---- dropout: every client gets the masks that it would draw alone -------------------------------


@dataclass
class _Dropout:
    """The masks of one pass, drawn from the clients' streams, or ahead of it."""

    streams: Sequence[OwnRandomness]
    #: what was drawn ahead, and for which layers; None if masks are drawn in the pass
    ahead: Iterator[tuple[_DropoutNd, Tensor]] | None = None
    #: for what masks were drawn in the pass
    called: list[Called] = field(default_factory=list)

    def masks(self, layer: _DropoutNd, row: Tensor) -> Tensor:
        """Return the masks of all clients for a layer, whose inputs are like one client's row."""
        if self.ahead is None:
            self.called.append((layer, torch.empty_like(row, device="meta")))
            return _draw(layer, torch.ones_like(row), self.streams)
        due = next(self.ahead, None)
        if due is None or due[0] is not layer or due[1].shape[1:] != row.shape:
            raise CannotStackError(OTHER_CALLS)
        return due[1]

    def end(self) -> None:
        """Raise if a layer was not called for which masks were drawn ahead."""
        if self.ahead is not None and next(self.ahead, None) is not None:
            raise CannotStackError(OTHER_CALLS)


def _dropped(layer: _DropoutNd, dropout: _Dropout, inputs: Tensor) -> Tensor:
    """Multiply the inputs of all clients by their masks."""
    values, dim = unwrapped(inputs.detach())
    row = values if dim is None else values.select(dim, 0)
    with outside_of_vmap():
        drawn = dropout.masks(layer, row)
    masks = wrapped(drawn, 0)
    if layer.inplace:
        return inputs.mul_(masks)
    return inputs * masks


def _draw(layer: _DropoutNd, ones: Tensor, streams: Sequence[OwnRandomness]) -> Tensor:
    """Return what the layer makes of ones, client by client."""
    drawn = []
    for stream in streams:
        with stream.drawing():
            drawn.append(type(layer).forward(layer, ones.clone()))
    return torch.stack(drawn)
