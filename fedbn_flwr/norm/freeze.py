"""Freezing batch normalization: its statistics, its affine parameters, or both."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.norm.detect import bn_layers, keeps_statistics
from fedbn_flwr.plugins import warn_once


class _StatisticsHold:
    """Stands in for `layer.train`: remembers the mode that was asked for and keeps the layer in
    eval mode.

    An object rather than a closure, so that a frozen model can be pickled and copied: the copy's
    hold then refers to the copy's layer.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.asked = layer.training
        # In the instance's own dictionary, where it comes before the class's `train`.
        layer.__dict__["train"] = self
        layer.training = False

    def __call__(self, mode: bool = True) -> _BatchNorm:
        self.asked = mode
        for child in self.layer.children():
            child.train(mode)
        self.layer.training = False
        return self.layer

    def release(self) -> None:
        del self.layer.__dict__["train"]
        self.layer.training = self.asked


@contextmanager
def freeze(model: nn.Module, statistics: bool = True, affine: bool = False) -> Iterator[None]:
    """Freeze the BN layers' statistics, their affine parameters, or both, until the end of the
    block.

    Zhong et al., "Making Batch Normalization Great in Federated Deep Learning", 2023, section 5,
    Table H. With frozen statistics a layer computes y = gamma (x - mean) / sqrt(var + eps) + beta
    in training too, with the running mean and variance as constants (eval mode, `model.train()` or
    not). At the end it is in the mode that `model.train()` or `model.eval()` last asked for. Blocks
    nest. Layers of which no parameter learns have frozen statistics in any case, and a log line
    says so once.
    """
    layers = bn_layers(model)
    kept = sum(map(keeps_statistics, layers.values()))
    if kept and not statistics:
        warn_once(
            f"{kept} of {len(layers)} BN layers keep their statistics, as none of their "
            "parameters learns"
        )
    for name, layer in layers.items():
        if statistics and layer.running_mean is None:
            raise ValueError(
                f"BN layer {name!r} has no running statistics, so they cannot be frozen"
            )
    with ExitStack() as undo:
        for layer in layers.values():
            holds = statistics or (keeps_statistics(layer) and layer.running_mean is not None)
            if holds and not isinstance(layer.__dict__.get("train"), _StatisticsHold):
                undo.callback(_StatisticsHold(layer).release)
            for parameter in (layer.weight, layer.bias):
                if affine and parameter is not None:
                    undo.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(False)
        yield
