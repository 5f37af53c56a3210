"""Dropout of stacked clients: every client's masks are those that it would draw alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedbn_flwr.layerwise import OwnRandomness

#: layers that multiply by a mask of their own drawing
_MASKING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Dropouts:
    """The dropout layers of a structure that is in the mode that it will train in.

    Other layers that draw at random are refused by `torch.func.vmap` itself.
    """

    def __init__(self, structure: nn.Module) -> None:
        layers = [layer for layer in structure.modules() if isinstance(layer, _DropoutNd) and layer.training]
        self._layers = [layer for layer in layers if type(layer) in _MASKING and layer.p > 0]

    @contextmanager
    def drawing(self, streams: Sequence[OwnRandomness]) -> Iterator[None]:
        """Inside the block, row i of what passes through the layers is masked from stream i."""
        try:
            for layer in self._layers:
                # in the instance's own dictionary, where it comes before the class's `forward`; hooks still run
                layer.__dict__["forward"] = _OwnMasks(layer, streams)
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)


class _OwnMasks:
    """Stands in for the forward of a dropout layer."""

    def __init__(self, layer: nn.Module, streams: Sequence[OwnRandomness]) -> None:
        self._layer, self._streams = layer, streams
        self._in_place = bool(layer.inplace)

    def __call__(self, inputs: Tensor) -> Tensor:
        masks: Tensor = _Masks.apply(inputs.detach(), self._layer, self._streams)
        return inputs.mul_(masks) if self._in_place else inputs * masks


class _Masks(torch.autograd.Function):
    """What the layer makes of ones, client by client."""

    @staticmethod
    def forward(inputs: Tensor, layer: nn.Module, streams: Sequence[OwnRandomness]) -> Tensor:
        raise RuntimeError("masks are only drawn for stacked clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], inputs: Tensor, layer: nn.Module, streams: Sequence[OwnRandomness]
    ) -> tuple[Tensor, int]:
        """One client after another draws."""
        rows = inputs.movedim(dims[0] or 0, 0)
        masks = []
        for row, stream in zip(rows, streams, strict=True):
            with stream.drawing():
                masks.append(type(layer).forward(layer, torch.ones_like(row)))
        return torch.stack(masks), 0
