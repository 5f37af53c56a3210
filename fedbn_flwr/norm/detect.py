"""Batch normalization by type: which layers, axes and state entries are BN's, and other forwards in
its place.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode


def bn_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Full dotted path -> BN layer, in the model's order.

    A layer shared under two names is listed once.
    """
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def foreign_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Full dotted path -> layer that learns and keeps running statistics, and is no BN of torch's.

    What such a class computes is not known, so its entries are like all others of the model.
    """
    return {
        name: layer
        for name, layer in model.named_modules()
        if not isinstance(layer, _BatchNorm | _InstanceNorm)
        and {"running_mean", "running_var"} <= dict(layer.named_buffers(recurse=False)).keys()
        and [*layer.parameters(recurse=False)]
    }


def about_foreign(model: nn.Module) -> str:
    """Say of a model's first foreign layer what it is; nothing if there is none."""
    for name, layer in foreign_layers(model).items():
        return (
            f"layer {name!r}, of the class {type(layer).__name__}, has running statistics and is "
            "no BN of torch's: derive its class from torch.nn.modules.batchnorm._BatchNorm (of a "
            "scripted, traced or exported model, use the one that it was made of)"
        )
    return ""


def keeps_statistics(layer: _BatchNorm) -> bool:
    """Return whether a BN layer has parameters of which none learns, and so keeps its statistics in
    training too.
    """
    return (
        not any(value.requires_grad for value in layer.parameters(recurse=False))
        and layer.weight is not None
    )


def after_norm(layer: _BatchNorm) -> Callable[[Tensor], Tensor] | None:
    """Return what a layer calls behind BN, if that is all that it does besides BN; else None."""
    kind = type(layer)
    if kind.forward in (_BatchNorm.forward, SyncBatchNorm.forward):
        return lambda outputs: outputs
    if kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm."):
        timms: Any = layer
        return lambda outputs: timms.act(timms.drop(outputs))
    return None


def lacks(model: nn.Module, need: str, in_training: bool = True) -> str:
    """Return in words what a model lacks of what a method needs of BN, in training or afterwards;
    nothing if it has that.

    `need` is `none`, `bn` (a layer), `affine` or `statistics` (of a layer), `all-statistics` (of
    every layer), `no-bn`, or the class that all of its BN layers must have.
    """
    if need == "none":
        return ""
    unknown = about_foreign(model)
    if unknown:
        return unknown
    layers = bn_layers(model)
    kinds = {type(layer).__name__ for layer in layers.values()}
    fits = kinds == ({need} - {"no-bn"})
    if kinds and not fits and need not in ("bn", "affine", "statistics", "all-statistics"):
        made = (
            "make it with `prepare(model, METHOD)` of fedbn_flwr.strategies, on the server and "
            "on the nodes"
        )
        return (
            "the method brings a normalizer of its own, and the model has "
            f"{', '.join(sorted(kinds))}: {made}"
        )
    kind = "running statistics"
    entry = "running_mean"
    if need == "affine":
        kind = "affine parameters"
        entry = "weight"
    if in_training and layers and all(map(keeps_statistics, layers.values())):
        return (
            "none of the model's BN layers has a parameter that learns, so all of them keep "
            "their statistics"
        )
    if fits:
        return ""
    without = [
        name for name, layer in layers.items() if need != "bn" and getattr(layer, entry) is None
    ]
    if without and (need == "all-statistics" or len(without) == len(layers)):
        return f"the model's BN layer {without[0]!r} has no {kind}"
    return "" if layers else "the model has no BN layer"


def channel_axes(inputs: Tensor) -> tuple[int, ...]:
    """The axes that batch statistics are taken over: all but the channels'."""
    return (0, *range(2, inputs.dim()))


def along_channels(values: Tensor, inputs: Tensor) -> Tensor:
    """Reshape a value for each channel so that it broadcasts over the inputs."""
    return values.reshape(-1, *[1] * (inputs.dim() - 2))


class FunctionalBatchNorm(TorchFunctionMode):
    """While active, notes whether `F.batch_norm` is called with statistics that are no BN layer's
    of the model.

    Calls that standardize a weight, as in ResNets without BN, do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of_layers = {id(layer.running_mean) for layer in bn_layers(model).values()}
        self._weights = set(map(_memory, model.parameters()))
        self.found = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the call, and make it."""
        options = kwargs or {}
        if function is F.batch_norm:
            given = inspect.signature(function).bind(*args, **options).arguments
            is_of_layer = id(given["running_mean"]) in self._of_layers
            if not is_of_layer and _memory(given["input"]) not in self._weights:
                self.found = True
        return function(*args, **options)


def _memory(value: Tensor) -> int:
    """Return where a tensor's values lie, which those of its views do, too."""
    return value.untyped_storage().data_ptr()


def statistics_keys(model: nn.Module) -> list[str]:
    """State-dict keys of BN's running means and variances."""
    return _bn_entries(model, "running_mean", "running_var")


def affine_keys(model: nn.Module) -> list[str]:
    """State-dict keys of BN's weights (gamma) and biases (beta)."""
    return _bn_entries(model, "weight", "bias")


def counter_keys(model: nn.Module) -> list[str]:
    """State-dict keys of BN's batch counters: 0-d integers, never to be averaged into a float."""
    return _bn_entries(model, "num_batches_tracked")


def bn_keys(model: nn.Module) -> list[str]:
    """State-dict keys of everything that a BN layer holds, whatever it is called."""
    return [
        key
        for prefix, layer in _named_layers(model)
        if isinstance(layer, _BatchNorm)
        for key in layer.state_dict(prefix=prefix)
    ]


def local_keys(model: nn.Module) -> list[str]:
    """State-dict keys that never leave the client: what a layer names in its `local_entries`."""
    return [
        prefix + entry
        for prefix, layer in _named_layers(model)
        for entry in getattr(layer, "local_entries", ())
    ]


def _bn_entries(model: nn.Module, *entries: str) -> list[str]:
    return [
        prefix + entry
        for prefix, layer in _named_layers(model)
        if isinstance(layer, _BatchNorm)
        for entry in entries
        if getattr(layer, entry) is not None
    ]


def _named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the layers, each with the beginning of its entries' keys."""
    # A state dict lists a shared layer under every name it has, so its keys must be too.
    for name, layer in model.named_modules(remove_duplicate=False):
        yield f"{name}." if name else "", layer


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Call other functions in the place of layers' forwards, inside the block; hooks still run."""
    before = {layer: layer.__dict__.get("forward") for layer in forwards}
    try:
        for layer, forward in forwards.items():
            # in the instance's own dictionary, where it comes before the class's `forward`
            layer.__dict__["forward"] = forward
        yield
    finally:
        for layer, earlier in before.items():
            layer.__dict__["forward"] = earlier
            if earlier is None:
                del layer.__dict__["forward"]
