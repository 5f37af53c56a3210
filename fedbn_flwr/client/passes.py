"""Passes over a node's training data without learning, and what they add up.

The messages of a pass are `train.gather`, and the instruction's `gather` names it, with an argument
after a colon. In engines and in a training loop of a user's own, batches of inputs and targets go
through the received model, and the pass says what leaves the node.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr import norm, wire
from fedbn_flwr.client.training import logits_of
from fedbn_flwr.device import where_exact
from fedbn_flwr.norm.moments import inputs_in, only_training
from fedbn_flwr.plugins import add, did_you_mean
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.closed_form import (
    MEANS_PASS,
    MOMENTS_PASS,
    OWN_PASS,
    HeadMoments,
    linear_layer,
)
from fedbn_flwr.wire.packed_moments import own_statistics, pack_moments

Batches = Iterable[tuple[Any, Tensor | None]]
#: of what a message may hold beside the model
NOTHING: Mapping[str, State] = MappingProxyType({})


class Pass(ABC):
    """What one pass of a model over a node's training data adds up."""

    #: whether `found` has means over the node's samples, so that engines and the server may add up
    #: those of several nodes, by their numbers of samples
    is_mean: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, argument: str = "", received: Mapping[str, State] = NOTHING
    ) -> None:
        """Prepare a pass of a model that has its state; `received` are the message's groups."""
        self.model = model

    @contextmanager
    def running(self) -> Iterator[None]:
        """While open, batches run: here, the model is in evaluation mode."""
        with only_training(self.model):
            yield

    @abstractmethod
    def see(self, outputs: Any, targets: Tensor | None) -> None:
        """Take what the model made of a batch, and the batch's targets."""

    @abstractmethod
    def found(self) -> State:
        """Return what leaves the node."""

    def own_entries(self) -> State:
        """Return the entries of the model that the node's own model gets before an evaluation."""
        raise ValueError(f"{type(self).__name__} finds no entries of a model")

    def run(self, batches: Batches) -> int:
        """Run the model over the batches; return the number of samples."""
        samples = 0
        with torch.no_grad(), self.running():
            for inputs, targets in batches:
                samples += len(inputs)
                self.see(self.model(inputs), targets)
        return samples


def parts_of(batch: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return inputs and targets of a batch, on a device.

    A batch is a tensor of inputs, a pair, or a dictionary: there the first tensor of more than one
    dimension is the inputs, and the first of others the targets. Without any, targets are None.
    """
    inputs = inputs_in(batch)
    if not isinstance(inputs, Tensor):
        raise ValueError(
            "a batch of training data is a pair of inputs and labels, or a dictionary with both, "
            f"not a {type(batch).__name__}"
        )
    targets: Any = None
    if isinstance(batch, Mapping):
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        targets = next((value for value in tensors if value.dim() <= 1), None)
    elif isinstance(batch, tuple | list):
        targets = next(iter(batch[1:]), None)
    if targets is not None:
        targets = torch.as_tensor(targets).to(device)
    return inputs.to(device), targets


P = TypeVar("P", bound=type[Pass])

#: the passes by name; `register_pass` adds one
PASSES: dict[str, type[Pass]] = {}


def register_pass(name: str) -> Callable[[P], P]:
    """Register a pass under the name by which an instruction asks for it; a class decorator.

    A name that another pass has is a ValueError.
    """

    def register(made: P) -> P:
        add(PASSES, "pass", name, made)
        return made

    return register


def kind_of_pass(instruction: Instruction) -> type[Pass]:
    """Return the pass that an instruction asks for; ValueError if this process has none."""
    name = instruction.gather.partition(":")[0]
    if name not in PASSES:
        raise ValueError(f"unknown pass {name!r}; {did_you_mean(name, PASSES)}")
    return PASSES[name]


def make_pass(model: nn.Module, instruction: Instruction, received: Mapping[str, State]) -> Pass:
    """Return the pass that an instruction asks for."""
    argument = instruction.gather.partition(":")[2]
    return kind_of_pass(instruction)(model, argument, received)


@register_pass(wire.STATISTICS)
class StatisticsPass(Pass):
    """The moments of what every BN layer sees, each normalizing with the mini-batch."""

    is_mean: ClassVar[bool] = False
    #: by layer, complete after the pass
    seen: Mapping[str, norm.Moments]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Gather while batches run."""
        with norm.gathering(self.model) as self.seen:
            yield

    def see(self, outputs: Any, targets: Tensor | None) -> None:
        """Take nothing: hooks of the layers do."""

    def found(self) -> State:
        """Return the moments under all names of the layers."""
        return pack_moments(self.model, self.seen)

    def own_entries(self) -> State:
        """Return running statistics as the node's data have them."""
        return own_statistics(self.model, self.seen)


@register_pass(MOMENTS_PASS)
class HeadPass(Pass):
    """The moments of what goes into the layer that the argument names, in evaluation mode.

    Received weights weigh samples by their classes.
    """

    has_second: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, argument: str = "", received: Mapping[str, State] = NOTHING
    ) -> None:
        super().__init__(model, argument, received)
        self._name = argument
        self._layer = linear_layer(model, argument)
        self._weights = received.get(wire.CLASS_WEIGHTS, {}).get(wire.CLASS_WEIGHTS)
        self._features: Tensor | None = None
        self._made: Tensor | None = None
        self._samples = 0
        self._has_labels = True
        self._cross: Tensor | float = 0.0
        self._second: Tensor | float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look at the layer, too."""
        handle = self._layer.register_forward_hook(self._take)
        try:
            with super().running():
                yield
        finally:
            handle.remove()

    def _take(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._features = inputs[0]
        self._made = output

    def see(self, outputs: Any, targets: Tensor | None) -> None:
        """Add a batch; ValueError if the layer's output is not the model's, or labels are not its
        classes.
        """
        features = self._features
        is_output = self._made is not None and torch.equal(logits_of(outputs), self._made)
        if features is None or features.dim() != 2 or not is_output:
            raise ValueError(
                f"layer {self._name!r} does not give the model's output: choose the one that does, "
                "closed-form=NAME"
            )
        if targets is None:
            raise ValueError("a head in closed form needs targets beside inputs")
        self._has_labels = not targets.is_floating_point()
        wanted = self._wanted(targets.to(features.device))
        rows = where_exact(features).double()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        wanted = where_exact(wanted).double()
        weighted = rows
        if self._weights is not None:
            of_sample = wanted @ self._weights.to(wanted)
            weighted = rows * of_sample[:, None]
        self._samples += len(rows)
        self._cross = self._cross + weighted.T @ wanted
        if self.has_second:
            self._second = self._second + weighted.T @ rows

    def _wanted(self, targets: Tensor) -> Tensor:
        """Return the targets with a column for each output."""
        outputs = self._layer.out_features
        if targets.is_floating_point():
            if self._weights is not None or not self.has_second:
                raise ValueError("means by class, and classes that weigh the same, need labels")
            if targets.numel() != len(targets) * outputs:
                raise ValueError(
                    f"layer {self._name!r} has {outputs} outputs, and targets have the shape "
                    f"{tuple(targets.shape[1:])}"
                )
            return targets.reshape(len(targets), outputs)
        if targets.dim() != 1:
            raise ValueError(
                "a head in closed form is for one label an image, not for segmentation"
            )
        if not 0 <= int(targets.min()) <= int(targets.max()) < outputs:
            raise ValueError(f"labels must be from 0 to {outputs - 1}, the outputs of the layer")
        return F.one_hot(targets, outputs)

    def found(self) -> State:
        """Return the means over all samples."""
        return self.moments().pack()

    def moments(self) -> HeadMoments:
        """Return the means over all samples."""
        if not isinstance(self._cross, Tensor):
            raise ValueError("there are no samples")
        second = None
        if isinstance(self._second, Tensor):
            second = (self._second / self._samples).cpu()
        return HeadMoments((self._cross / self._samples).cpu(), second, self._has_labels)


@register_pass(OWN_PASS)
class OwnHeadPass(HeadPass):
    """A head of the node's own: from all nodes' moments, which the message brings, and from its own
    with a weight.
    """

    def __init__(
        self, model: nn.Module, argument: str = "", received: Mapping[str, State] = NOTHING
    ) -> None:
        super().__init__(model, argument, received)
        self._of_all = received[wire.MOMENTS]

    def own_entries(self) -> State:
        """Return the layer as ridge regression has it, its own samples counting `own-weight` times
        more.
        """
        given = self._of_all
        everyone = HeadMoments.unpack(given)
        together = everyone.plus(
            self.moments(), float(given["own-weight"]) * self._samples / float(given["samples"])
        )
        layer = self._layer
        weight, bias = together.solve(float(given["ridge"]), layer.bias is not None)
        solved = {f"{self._name}.weight": weight.to(layer.weight)}
        if layer.bias is not None:
            solved[f"{self._name}.bias"] = bias.to(layer.bias)
        return solved


@register_pass(MEANS_PASS)
class ClassMeansPass(HeadPass):
    """The means by class of what goes into the layer that the argument names."""

    has_second: ClassVar[bool] = False
