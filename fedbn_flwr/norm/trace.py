"""The order of a model's convolutions and activations, from a trace of its forward pass."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

Activation = Callable[[Tensor], Tensor]

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_PRODUCTS = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_ACTIVATION_LAYERS = (
    nn.ReLU
    | nn.ReLU6
    | nn.LeakyReLU
    | nn.ELU
    | nn.SiLU
    | nn.GELU
    | nn.Mish
    | nn.Hardswish
    | nn.Tanh
    | nn.Sigmoid
)
_FUNCTIONS = (
    F.relu,
    F.relu6,
    F.leaky_relu,
    F.elu,
    F.silu,
    F.gelu,
    F.mish,
    F.hardswish,
    torch.relu,
    torch.tanh,
)
_METHODS: dict[object, Activation] = {
    "relu": torch.relu,
    "relu_": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
_ACTIVATION_FUNCTIONS = _METHODS | {function: function for function in _FUNCTIONS}


@dataclass
class Wiring:
    """Names of the last convolution of each residual branch, and by convolution the activation that
    feeds it.
    """

    branch_ends: set[str] = field(default_factory=set)
    activations: dict[str, Activation] = field(default_factory=dict)


def wiring(model: nn.Module) -> Wiring:
    """Trace the model; one whose forward pass cannot be traced raises whatever `torch.fx` raises.

    An addition ends a residual branch where more convolutions lie behind one operand than behind
    the other.
    """
    walk = _Walk(model)
    result = Wiring()
    for node in walk.nodes:
        if node.target in _ADDITIONS:
            end = walk.branch_end(node)
            if end is not None:
                result.branch_ends.add(str(end.target))
        if walk.is_convolution(node):
            activation = walk.feeding_activation(node)
            if activation is not None:
                result.activations[str(node.target)] = activation
    return result


class _Walk:
    """The traced operations, and for each how many convolutions lie behind it."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = dict(model.named_modules())
        self.nodes = list(fx.Tracer().trace(model).nodes)
        self.depth: dict[fx.Node, int] = {}
        for node in self.nodes:
            behind = max((self.depth[source] for source in node.all_input_nodes), default=0)
            self.depth[node] = behind + self.is_convolution(node)

    def is_convolution(self, node: fx.Node) -> bool:
        return isinstance(self._layer(node), _ConvNd)

    def branch_end(self, addition: fx.Node) -> fx.Node | None:
        operands = sorted(addition.all_input_nodes, key=self.depth.__getitem__)
        if len(operands) != 2 or self.depth[operands[0]] == self.depth[operands[1]]:
            return None
        return next(filter(self.is_convolution, self._back(operands[1])), None)

    def feeding_activation(self, convolution: fx.Node) -> Activation | None:
        for node in self._back(convolution.all_input_nodes[0]):
            layer = self._layer(node)
            if isinstance(layer, _ACTIVATION_LAYERS):
                return layer
            if node.target in _ACTIVATION_FUNCTIONS:
                return _ACTIVATION_FUNCTIONS[node.target]
            if node.op == "placeholder":
                # images, whose neighbouring pixels share much that a standardized weight ignores
                return torch.relu
            if isinstance(layer, _ConvNd):
                return None
        return None

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.layers[str(node.target)] if node.op == "call_module" else None

    def _back(self, node: fx.Node) -> Iterator[fx.Node]:
        """The main path to a node, backwards, to the nearest addition or the start."""
        yield node
        while node.all_input_nodes and node.target not in _ADDITIONS:
            # A gate (squeeze and excitation) is computed from the features that it multiplies, so
            # it lies deeper.
            nearer = min if node.target in _PRODUCTS else max
            node = nearer(node.all_input_nodes, key=self.depth.__getitem__)
            yield node
