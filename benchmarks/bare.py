"""The yardstick: federated averaging in plain PyTorch, without a framework."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BareLoop:
    """A loop over clients that trains one model for all of them; data are one tensor on the device.

    After `freeze_after` rounds BN keeps its statistics, as FixBN wants it; 0 is never.
    """

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tensor, Tensor],
        parts: Sequence[Tensor],
        *,
        local_steps: int,
        batch_size: int,
        lr: float,
        freeze_after: int = 0,
    ) -> None:
        self.model, self._parts, self._lr = model, parts, lr
        self._data = data
        self._inputs, self._labels = data
        self._local_steps, self._batch_size, self._freeze_after = (
            local_steps,
            batch_size,
            freeze_after,
        )
        self._generator = torch.Generator().manual_seed(0)
        self._rounds = 0
        #: of the model, in which clients train; of the server, before the round; and their sum so
        #: far
        self._own = list(model.state_dict().values())
        self._current = [value.clone() for value in self._own]
        self._sum = [value.clone() for value in self._own]

    def round(self) -> None:
        """Train every client from the same state, and average their states by their numbers of
        samples.
        """
        self._set_mode()
        samples = sum(len(part) for part in self._parts)
        for total in self._sum:
            total.zero_()
        for part in self._parts:
            self._put(self._own, self._current)
            self._train(part)
            self._add(len(part) / samples)
        self._put(self._current, self._sum)
        self._rounds += 1

    def state(self) -> dict[str, Tensor]:
        """The server's model."""
        return {
            name: value.clone()
            for name, value in zip(self.model.state_dict(), self._current, strict=True)
        }

    def _set_mode(self) -> None:
        self.model.train()
        if self._freeze_after and self._rounds >= self._freeze_after:
            for layer in self.model.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.eval()

    def _train(self, part: Tensor) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self._lr)
        for batch in self._batches(part):
            optimizer.zero_grad()
            F.cross_entropy(self.model(self._inputs[batch]), self._labels[batch]).backward()
            optimizer.step()

    def _batches(self, part: Tensor) -> Iterator[Tensor]:
        taken = 0
        while True:
            order = torch.randperm(len(part), generator=self._generator).to(part.device)
            for batch in part[order].split(self._batch_size):
                if taken == self._local_steps:
                    return
                taken += 1
                yield batch

    def _put(self, target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        for value, new in zip(target, source, strict=True):
            value.copy_(new)

    def _add(self, weight: float) -> None:
        for total, value in zip(self._sum, self._own, strict=True):
            if value.is_floating_point():
                total.add_(value, alpha=weight)
            else:
                total.copy_(value)


class CapturedLoop(BareLoop):
    """The same with forward, backward and SGD of a step in one graph, of batches of one size."""

    _graph: Any = None

    def _train(self, part: Tensor) -> None:
        for batch in self._batches(part):
            if self._graph is None:
                self._capture(batch)
            for static, values in zip(self._static, self._data, strict=True):
                static.copy_(values[batch])
            self._graph.replay()

    def _capture(self, batch: Tensor) -> None:
        """Record a step; the model stays as it was."""
        if self._freeze_after:
            raise ValueError("a captured step does not freeze BN")
        module = torch.get_device_module(batch.device)
        self._static = [values[batch].clone() for values in self._data]
        before = [value.clone() for value in self._own]
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream), torch.autograd.set_multithreading_enabled(False):
            for _ in range(3):  # libraries make themselves ready
                self._step(*self._static)
        module.current_stream().wait_stream(stream)
        self._graph = module.CUDAGraph()
        with module.graph(self._graph), torch.autograd.set_multithreading_enabled(False):
            self._step(*self._static)
        self._put(self._own, before)

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        learned: list[Tensor] = list(self.model.parameters())
        loss = F.cross_entropy(self.model(inputs), targets)
        gradients = torch.autograd.grad(loss, learned)
        with torch.no_grad():
            torch._foreach_add_(learned, gradients, alpha=-self._lr)
