"""Dropout of stacked clients: every client gets the masks that it would draw alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedbn_flwr.layerwise import OwnRandomness

#: layers that multiply their inputs by a random mask
_MASKING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Dropouts:
    """The active dropout layers of a model, which is already in the mode in which it will train.

    Other layers that draw at random are refused by `torch.func.vmap` itself.
    """

    def __init__(self, structure: nn.Module) -> None:
        layers = [layer for layer in structure.modules() if isinstance(layer, _DropoutNd) and layer.training]
        self._layers = [layer for layer in layers if type(layer) in _MASKING and layer.p > 0]

    @contextmanager
    def drawing(self, streams: Sequence[OwnRandomness]) -> Iterator[None]:
        """Draw the mask of row i of a layer's inputs from stream i, inside the block."""
        try:
            for layer in self._layers:
                # in the instance's own dictionary, where it comes before the class's `forward`; hooks still run
                layer.__dict__["forward"] = _OwnMasks(layer, streams)
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)


class _OwnMasks:
    """The forward of a dropout layer for all clients at once."""

    def __init__(self, layer: nn.Module, streams: Sequence[OwnRandomness]) -> None:
        self._layer, self._streams = layer, streams
        self._in_place = bool(layer.inplace)

    def __call__(self, inputs: Tensor) -> Tensor:
        masks: Tensor = _Masks.apply(inputs.detach(), self._layer, self._streams)
        return inputs.mul_(masks) if self._in_place else inputs * masks


class _Masks(torch.autograd.Function):
    """The masks of all clients: what the layer makes of ones, client by client."""

    @staticmethod
    def forward(inputs: Tensor, layer: nn.Module, streams: Sequence[OwnRandomness]) -> Tensor:
        """Refuse: masks are only drawn for stacked clients."""
        raise RuntimeError("masks are only drawn for stacked clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: masks have no gradient."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], inputs: Tensor, layer: nn.Module, streams: Sequence[OwnRandomness]
    ) -> tuple[Tensor, int]:
        """Draw a mask for one client after another."""
        rows = inputs.movedim(dims[0] or 0, 0)
        masks = []
        for row, stream in zip(rows, streams, strict=True):
            with stream.drawing():
                masks.append(type(layer).forward(layer, torch.ones_like(row)))
        return torch.stack(masks), 0
