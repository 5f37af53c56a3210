"""What a process sees of the networks that are called in it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fedbn_flwr.norm.detect import foreign_layers
from fedbn_flwr.state import Arrays

try:
    from torch._C import _functorch as functorch
except ImportError:
    functorch = None  # type: ignore[assignment]

#: classes that are no `_BatchNorm`, and whose names users look for in its place
OTHERS = (
    "FrozenBatchNorm2d",
    "GroupNorm",
    "LayerNorm",
    "LayerNorm2d",
    "RMSNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
)
#: in front of the names of layers, and a number, where several networks learn
PREFIX = "network "
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
#: more samples than a mini-batch has
MANY = 2**31


@dataclass
class LayerSeen:
    """A BN layer, and how it was called."""

    kind: str
    #: of its `weight`; None without one
    learns: bool | None
    tracks: bool
    momentum: float | None
    #: calls with gradients, in training and in evaluation mode
    learning: int = 0
    fixed: int = 0
    #: calls without gradients, in training and in evaluation mode
    measuring: int = 0
    evaluating: int = 0
    #: calls in evaluation mode through which a gradient came back
    trained_fixed: int = 0
    #: least number of samples among the calls with gradients in training mode
    fewest: int = MANY

    def note(self, batch: int, training: bool) -> None:
        """Count one call."""
        if torch.is_grad_enabled():
            if training:
                self.learning += 1
                self.fewest = min(self.fewest, batch)
            else:
                self.fixed += 1
        elif training:
            self.measuring += 1
        else:
            self.evaluating += 1

    def note_gradients(self, gradients: tuple[torch.Tensor | None, ...], _: object) -> None:
        """Count one call in evaluation mode that was trained through.

        The first gradient is that of the inputs: an attack on a network's inputs asks for it alone,
        and trains nothing. That shows only where the layer has parameters that learn.
        """
        of_layer = gradients[1:]
        is_attack = self.learns and of_layer and all(gradient is None for gradient in of_layer)
        if not is_attack:
            self.trained_fixed += 1


@dataclass
class Network:
    """A network that was called by itself, not by another one."""

    layers: dict[str, LayerSeen]
    #: classes of other normalizers, and how many there are of each
    others: dict[str, int]
    #: layers of other classes that have running statistics
    foreign: tuple[str, ...]
    parameters: set[str]
    #: all entries of its state, at its first call and at the end
    start: Arrays
    end: Arrays
    #: whether a parameter has gradients
    learns: bool = True
    #: by entry, the array of the message that holds it, and the one of the reply
    received: dict[str, str] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)
    #: what is left of the parameters' change in what is sent; None where that is no one number
    kept_change: float | None = 1.0
    #: whether what is sent is the change of the entries, to be added to what was received
    sends_changes: bool = False
    #: of the squared norm of what training changed, the part of other entries than parameters
    statistics_share: float = 0.0

    @property
    def learned(self) -> bool:
        """Whether BN layers of it were called with gradients."""
        return any(layer.learning or layer.fixed for layer in self.layers.values())

    @property
    def trained(self) -> bool:
        """Whether BN layers of it were called with gradients in training mode."""
        return any(layer.learning for layer in self.layers.values())

    @property
    def changed(self) -> bool:
        """Whether a parameter has other numbers at the end."""
        both = self.parameters & self.start.keys() & self.end.keys()
        return any(not same_numbers(self.start[name], self.end[name]) for name in both)

    def is_version_of_one(self, others: Iterable["Network"]) -> bool:
        """Whether it has another network's entries, and only the other learned: a copy of the
        global model, the node's last one, or an average of weights, as MOON and BYOL compare with.
        """
        if self.changed and self.learns:
            return False
        shapes = _shapes(self.start)
        return any(
            other.learns and _shapes(other.start) == shapes and other.changed for other in others
        )

    def of_layers(self) -> "Network":
        """Return it with the entries of BN layers only."""
        return replace(self, start=self._entries(self.start), end=self._entries(self.end))

    def _entries(self, state: Arrays) -> Arrays:
        return {name: value for name, value in state.items() if layer_of(name) in self.layers}


def _shapes(state: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in state.items()}


def layer_of(entry: str) -> str:
    """Return the name of the layer that an entry of a state belongs to."""
    return entry.rpartition(".")[0]


@dataclass
class _Root:
    """A module that was called by itself, and its state before it first learned.

    What was received may be loaded after a first call without gradients, or in evaluation mode.
    """

    module: nn.Module
    start: Arrays = field(default_factory=dict)
    #: of the call before which the state was taken: 2 with gradients, and 1 more in training mode
    rank: int = 0
    #: whether BN layers in it were called with gradients in training mode
    trains: bool = False

    def before_call(self) -> None:
        """Take the state, if this call is the first of its rank; an evaluation changes nothing."""
        rank = 0
        if self.module.training:
            rank = 1
        if torch.is_grad_enabled():
            rank += 2
        if rank > self.rank:
            self.rank = rank
            self.start = state_of(self.module)


class NetworkObserver:
    """While active, watches all networks of the process."""

    def __init__(self) -> None:
        self._roots: dict[int, _Root] = {}
        #: the one that is being called, or was the last
        self._called: _Root | None = None
        self._layers: dict[int, LayerSeen] = {}
        self._depth = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "NetworkObserver":
        before = hooks.register_module_forward_pre_hook(self._before)
        after = hooks.register_module_forward_hook(self._after, always_call=True)
        self._handles = [before, after]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_tracing():  # what is done here would be in the graph
            return
        if self._depth == 0:
            if id(module) not in self._roots and _is_wrapper(module):
                return
            self._called = None
            if _has_parameters(module):
                self._called = self._roots.setdefault(id(module), _Root(module))
                self._called.before_call()
        self._depth += 1
        if isinstance(module, _BatchNorm):
            seen = self._layers.get(id(module))
            if seen is None:
                seen = self._layers[id(module)] = describe_layer(module)
            if inputs and isinstance(inputs[0], torch.Tensor):
                seen.note(len(inputs[0]), module.training)
                if torch.is_grad_enabled() and module.weight is not None:
                    seen.learns = module.weight.requires_grad
            if self._called:
                self._called.trains |= module.training and torch.is_grad_enabled()

    def _after(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if is_tracing():
            return
        if self._depth:  # a wrapper has not been counted
            self._depth -= 1
        seen = self._layers.get(id(module))
        if seen is None or module.training:
            return
        if isinstance(outputs, torch.Tensor) and outputs.grad_fn:
            outputs.grad_fn.register_hook(seen.note_gradients)

    def take(self) -> list[Network]:
        """Return the networks that were called since the last time.

        A part of another one, such as a layer of which a detector measures the stride when it is
        made, is a network of its own only if it was trained.
        """
        parts = set[int]()
        for root in self._roots.values():
            parts |= {id(part) for part in root.module.modules() if part is not root.module}
        networks = [
            describe_network(root.module, root.start, self._layers)
            for key, root in self._roots.items()
            if root.trains or key not in parts
        ]
        self._roots = {}
        self._called = None
        self._layers = {}
        self._depth = 0
        return networks


def describe_network(
    root: nn.Module, start: Arrays | None = None, calls: Mapping[int, LayerSeen] | None = None
) -> Network:
    """Describe a network, with what is known of the calls of its layers, by their `id`."""
    layers = {}
    others = dict[str, int]()
    for name, module in root.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm):
            layers[name] = (calls or {}).get(id(module)) or describe_layer(module)
        elif kind in OTHERS:
            if getattr(module, "track_running_stats", False):
                kind += " with running statistics"
            others[kind] = others.get(kind, 0) + 1
    parameters = dict(root.named_parameters())
    learns = any(parameter.requires_grad for parameter in parameters.values())
    end = state_of(root)
    foreign = tuple(foreign_layers(root))
    return Network(layers, others, foreign, {*parameters}, start or end, end, learns)


def describe_layer(layer: _BatchNorm) -> LayerSeen:
    """Describe a BN layer that was not called yet."""
    learns = None
    if layer.weight is not None:
        learns = layer.weight.requires_grad
    return LayerSeen(type(layer).__name__, learns, layer.running_mean is not None, layer.momentum)


def state_of(module: nn.Module) -> Arrays:
    """Return a copy of a module's state."""
    return as_arrays(module.state_dict())


def as_arrays(state: Mapping[str, Any]) -> Arrays:
    """Return the entries of a state that are numbers, tensors copied, bfloat16 as float32."""
    arrays = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            tensor = value.detach().cpu()
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.float()
            arrays[name] = _numbers(tensor)
        elif isinstance(value, Array):
            arrays[name] = value.numpy()
        elif isinstance(value, np.ndarray):
            arrays[name] = value
    return arrays


def _numbers(tensor: torch.Tensor) -> NDArray[Any]:
    try:
        return tensor.numpy().copy()
    except RuntimeError:  # inside of `torch.func.grad` and the like
        while functorch and functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        return np.array(tensor.tolist(), str(tensor.dtype).removeprefix("torch."))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether a module has the state of the one that it wraps, as Lightning's Fabric makes
    it, and so other names than its layers have.
    """
    names = {name for name, _ in module.named_parameters()}
    return bool(names) and names.isdisjoint(module.state_dict())


def main_network(networks: Iterable[Network], *messages: Arrays) -> Network | None:
    """Return the network that learns, or the one with the most layers if none does.

    Parts that are called one by one, such as a backbone and a head, are one network. Versions of
    one that learns are no parts. One that was never in training mode, beside others that were, is a
    part only if the messages have its numbers: detectors that were made and not used have been
    called, too.
    """
    every = list(networks)
    learning = [
        network for network in every if network.learned and not network.is_version_of_one(every)
    ]
    trained = [network for network in learning if network.trained]
    if trained and len(trained) < len(learning):
        exchanged = {_digest(array) for arrays in messages for array in arrays.values()}
        learning = [
            network for network in learning if network.trained or _is_among(network, exchanged)
        ]
    if len(learning) > 1:
        return _joined(learning)
    return max(learning or every, key=lambda network: len(network.layers), default=None)


def _is_among(network: Network, exchanged: set[bytes | None]) -> bool:
    """Return whether at least half of a network's arrays have numbers that were exchanged."""
    own = [_digest(array) for array in network.start.values()]
    telling = [digest for digest in own if digest]
    return 2 * sum(digest in exchanged for digest in telling) >= len(telling)


def _digest(array: NDArray[Any]) -> bytes | None:
    """Return what tells numbers apart in any precision; None of those that are all alike."""
    if not array.size or (array == array.flat[0]).all():
        return None
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    return array.tobytes()


def network_of(layer: str) -> str:
    """Return the network of a layer, among several that learn."""
    if layer.startswith(PREFIX):
        return layer.partition(".")[0]
    return ""


def _joined(networks: list[Network]) -> Network:
    whole = Network({}, {}, (), set(), {}, {})
    for number, network in enumerate(networks, 1):
        prefix = f"{PREFIX}{number}"
        for kind, count in network.others.items():
            whole.others[kind] = whole.others.get(kind, 0) + count
        whole.layers |= {_within(prefix, name): layer for name, layer in network.layers.items()}
        whole.foreign += tuple(_within(prefix, name) for name in network.foreign)
        whole.parameters |= {_within(prefix, name) for name in network.parameters}
        whole.start |= {_within(prefix, name): value for name, value in network.start.items()}
        whole.end |= {_within(prefix, name): value for name, value in network.end.items()}
    return whole


def _within(network: str, name: str) -> str:
    """Return the name of a network's layer or entry; a layer that is the network itself has none of
    its own.
    """
    return f"{network}.{name}".removesuffix(".")


# ---- which array of a message is which entry -----------------------------------------------------


def match(arrays: Arrays, state: Arrays, parameters: Iterable[str] = ()) -> dict[str, str]:
    """Return by entry of a state the array that holds it: found by names, else by numbers, else by
    positions.
    """
    return (
        _by_name(arrays, state)
        or _by_numbers(arrays, state)
        or _by_position(arrays, state, parameters)
    )


def _by_name(arrays: Arrays, state: Arrays) -> dict[str, str]:
    """Match if half of the arrays or more are named. Names that are the same come first, then those
    of one prefix, such as `module.`, that most have on one side.

    A second set of arrays for an entry that was found, such as SCAFFOLD's control variates, is none
    of the state.
    """
    by_prefixes: dict[tuple[str, str, str], dict[str, str]] = {}
    named = set[str]()
    for entry, value in state.items():
        network = network_of(entry)
        own = entry.removeprefix(f"{network}.")
        for key, array in arrays.items():
            if array.size == value.size and _is_tail(own, key):
                prefixes = (network, key[: -len(own)], own[: -len(key)])
                by_prefixes.setdefault(prefixes, {})[entry] = key
                named.add(key)
    if 2 * len(named) < len(arrays):
        return {}

    def rank(prefixes: tuple[str, str, str]) -> tuple[bool, int]:
        return not any(prefixes[1:]), len(by_prefixes[prefixes])

    found = dict[str, str]()
    used = set[str]()
    for prefixes in sorted(by_prefixes, key=rank, reverse=True):
        pairs = by_prefixes[prefixes]
        if found.keys().isdisjoint(pairs):
            found |= {entry: key for entry, key in pairs.items() if key not in used}
        used |= set(pairs.values())
    return found


def _is_tail(entry: str, key: str) -> bool:
    """Return whether one of two names ends with the other; a number is a place, and no name."""
    if key.isdecimal():
        return False
    return key == entry or key.endswith(f".{entry}") or entry.endswith(f".{key}")


def _by_numbers(arrays: Arrays, state: Arrays) -> dict[str, str]:
    """Match if half of the arrays or more have an entry's numbers."""
    names = list(state)
    free = dict.fromkeys(names)
    found = {}
    last = -1
    for key, array in arrays.items():
        equal = [name for name in free if same_numbers(array, state[name])]
        if equal:
            # entries with the same numbers, such as counters, are in the state's order
            behind = [name for name in equal if names.index(name) > last]
            name = (behind or equal)[0]
            del free[name]
            found[name] = key
            last = names.index(name)
    if 2 * len(found) < len(arrays):
        return {}
    return found


def same_numbers(array: NDArray[Any], entry: NDArray[Any]) -> bool:
    """Return whether an array has an entry's numbers, in its own precision or the entry's."""
    if array.size != entry.size:
        return False
    with np.errstate(all="ignore"):
        array = array.reshape(entry.shape)
        return np.array_equal(array, entry.astype(array.dtype), equal_nan=True) or np.array_equal(
            array.astype(entry.dtype), entry, equal_nan=True
        )


def _by_position(arrays: Arrays, state: Arrays, parameters: Iterable[str] = ()) -> dict[str, str]:
    """Match arrays with all entries, all but the counters, or the parameters, whichever has their
    shapes in this order.
    """
    shapes = [array.shape for array in arrays.values()]
    learned = set(parameters)
    for names in (
        list(state),
        [name for name in state if not name.endswith("num_batches_tracked")],
        [name for name in state if name in learned],
    ):
        if [state[name].shape for name in names] == shapes:
            return dict(zip(names, arrays, strict=True))
    return {}
