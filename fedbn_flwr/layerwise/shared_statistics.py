"""Let the BN layers of a model share their statistics, as long as a step lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.layerwise.exchange import Exchange
from fedbn_flwr.layerwise.shared_batch_norm import Mode, SharedBatchNorm, Use
from fedbn_flwr.norm import bn_layers
from fedbn_flwr.norm.detect import after_norm, replaced_forwards

#: what computes a layer's outputs, mean, biased variance and count
Apply = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@contextmanager
def shared_statistics(
    model: nn.Module,
    exchange: Exchange,
    mode: Mode = "fused",
    final: bool = True,
    apply: Apply = SharedBatchNorm.apply,
) -> Iterator[None]:
    """Let BN layers use the statistics of all clients in place of their mini-batch's, inside the
    block.

    Every BN layer takes part, by type (SyncBN as BN). A layer with frozen statistics (eval mode)
    computes what it always computes, and a layer used twice has exchanges of each use. The backward
    pass may be inside the block or after it. At the end the layers are as before, and the running
    statistics move once for each use, by torch's update with the global mean and the global
    variance times n / (n - 1), n being the count over all clients. They stay after an exception (if
    the step was abandoned, for instance), and if the pass is not `final`, but only gathers the
    clients' local values. A model takes part in one step at a time. Inside `torch.func.vmap` the
    model is that of stacked clients, and requests have a row for each client. `apply` takes the
    inputs, weight, bias and eps of a layer, and its `Use`, through `SharedBatchNorm`.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
    stand_ins = [
        _SharedForward(layer, layer.forward, Use(name, exchange, mode, final, eps=layer.eps), apply)
        for name, layer in check_layers(model).items()
    ]
    live = [stand_in for stand_in in stand_ins if _uses_batch_statistics(stand_in.layer)]
    with replaced_forwards({stand_in.layer: stand_in for stand_in in stand_ins}):
        yield
    if any(stand_in.rests for stand_in in live) and not any(
        stand_in.uses for stand_in in stand_ins
    ):
        raise UnlikeBatchNormError(
            "no BN layer normalized with a batch's statistics: does `forward` set eval mode?"
        )
    if final:
        for stand_in in stand_ins:
            for mean, variance, count in stand_in.seen:
                _move(stand_in.layer, mean, variance * (count / (count - 1)))


@dataclass
class _SharedForward:
    """A replacement for the forward of one BN layer."""

    layer: _BatchNorm
    plain: Callable[[Tensor], Tensor]
    #: the first in a pass
    use: Use
    apply: Apply
    uses: int = 0
    #: whether it was called in eval mode
    rests: bool = False
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, inputs: Tensor) -> Tensor:
        layer = self.layer
        if not _uses_batch_statistics(layer):
            self.rests = True
            return self.plain(inputs)
        layer._check_input_dim(inputs)
        self.uses += 1
        if self.uses == 1:
            use = self.use
        else:
            use = replace(self.use, layer=f"{self.use.layer}#{self.uses}")
        outputs, *statistics = self.apply(inputs, layer.weight, layer.bias, layer.eps, use)
        if layer.training and layer.track_running_stats and layer.running_mean is not None:
            self.seen.append((statistics[0], statistics[1], statistics[2]))
        behind = after_norm(layer)
        return behind(outputs) if behind else outputs


@torch.no_grad()
def _move(layer: _BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    """Move the running statistics as `_BatchNorm.forward` and its kernel do."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if layer.momentum is None:
        assert layer.num_batches_tracked is not None
        factor = 1 / float(layer.num_batches_tracked)
    else:
        factor = layer.momentum
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        assert running is not None
        running.mul_(1 - factor).add_(new.to(running), alpha=factor)


class UnlikeBatchNormError(ValueError):
    """A BN layer whose statistics cannot be shared, as it computes something else."""


def check_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return a model's BN layers.

    An UnlikeBatchNormError names one whose statistics cannot be shared, or a model that is to train
    and keeps all of these layers in eval mode.
    """
    layers = bn_layers(model)
    if layers and not any(map(_uses_batch_statistics, layers.values())):
        raise UnlikeBatchNormError(
            "all BN layers are in eval mode in training, so no statistics are left to share"
        )
    for name, layer in layers.items():
        if _uses_batch_statistics(layer) and not after_norm(layer):
            kind = type(layer).__name__
            raise UnlikeBatchNormError(
                f"layer {name!r} is a {kind}, which computes something else than BN"
            )
    return layers


def _uses_batch_statistics(layer: _BatchNorm) -> bool:
    return layer.training or layer.running_mean is None
