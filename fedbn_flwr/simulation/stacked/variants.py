"""Other ways of computing one client's model: compiled, or with images in another order of memory."""

import copy
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.client import BNClient

Forward = Callable[[Tensor], Tensor]


class Variants:
    """What is made of models, once for each."""

    def __init__(self) -> None:
        self._compiled: WeakKeyDictionary[nn.Module, Forward] = WeakKeyDictionary()
        self._channels_last: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def prepare(self, client: BNClient, way: str) -> None:
        """Let a client, which lives for one message, train in this way."""
        if way == "compiled":
            client.forward = self._compile(client.model)
        elif way == "channels-last":
            client.model = model = self._reorder(client.model)
            client.forward = lambda inputs: model(_with_channels_last(inputs))

    def _compile(self, model: nn.Module) -> Forward:
        if model not in self._compiled:
            # on a GPU also as CUDA graphs: a step is then one launch, and Python is not waited for
            on_gpu = any(value.is_cuda for value in model.parameters())
            self._compiled[model] = torch.compile(model, dynamic=False, mode="reduce-overhead" if on_gpu else None)
        return self._compiled[model]

    def _reorder(self, model: nn.Module) -> nn.Module:
        if model not in self._channels_last:
            self._channels_last[model] = copy.deepcopy(model).to(memory_format=torch.channels_last)
        return self._channels_last[model]


def has_images(model: nn.Module) -> bool:
    """Whether the order of channels matters to the model."""
    return any(isinstance(layer, _ConvNd) for layer in model.modules())


def _with_channels_last(inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
