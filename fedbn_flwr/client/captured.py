"""The forward and backward pass of a step on an accelerator: recorded once, and replayed in every step that is equal.

Most of a small model's step on a GPU is Python that launches hundreds of short operations; a graph of them is launched
at once. Rules, optimizers and rates stay outside. A step that was captured has the bits of the same step by autograd,
and proves it where it runs: at its first use both are taken on the same batch, and if they differ it is not used.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from logging import INFO
from math import nan
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from flwr.common import log
from torch import Tensor, nn

from fedbn_flwr.client.rules import Session
from fedbn_flwr.client.training import Batch, Gradients, LossFunction, backward

#: steps of a model that are kept, the latest
KEPT = 16
#: packages whose layers do the same whenever they are called, or draw at random, which is noticed
KNOWN = ("fedbn_flwr", "timm", "torch", "torchvision")
#: attributes of layers on which their passes may depend
_PLAIN = (bool, int, float, str, tuple, type(None))

B = TypeVar("B")


@dataclass(eq=False)
class CapturedStep:
    """A graph of both passes, and the tensors that it reads and writes."""

    graph: Any
    batch: Batch
    gradients: Sequence[Tensor | None]
    loss: Tensor
    count: int | Tensor

    def replay(self, batch: Batch, learned: Sequence[nn.Parameter]) -> tuple[Tensor, int | Tensor]:
        """Take the passes on another batch."""
        for mine, given in zip(self.batch, batch, strict=True):
            mine.copy_(given)
        self.graph.replay()
        for parameter, gradient in zip(learned, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss.clone(), self.count


class _Captures:
    """What is known of a model's steps: those that were captured, None for those that cannot be, and said reasons."""

    def __init__(self) -> None:
        self.steps: OrderedDict[Hashable, CapturedStep | None] = OrderedDict()
        self.reasons: set[str] = set()


_OF_MODELS: WeakKeyDictionary[nn.Module, _Captures] = WeakKeyDictionary()
#: all that are alive share one memory: no two of them are replayed at once, and none keeps anything in it
_ALIVE: WeakSet[CapturedStep] = WeakSet()


@dataclass(eq=False)
class Replaying(Generic[B]):
    """Makes gradients by replaying captured steps where it can, and else by autograd."""

    #: what holds the entries, and the layers behind them: the model itself, unless it is stacked
    model: nn.Module
    layers: nn.Module
    learned: Sequence[nn.Parameter]
    loss_of: Gradients[B]
    #: returns a batch's tensors, None for a batch unlike others; and makes such a batch of tensors
    tensors_of: Callable[[B], Batch | None]
    batch_of: Callable[[Tensor, Tensor], B]
    #: what else the passes depend on
    key: Hashable
    #: whether the next step is unlike the others
    apart: bool

    def __post_init__(self) -> None:
        self._eager = backward(self.loss_of, self.learned)
        self._known = _OF_MODELS.setdefault(self.model, _Captures())
        self._now: dict[Hashable, CapturedStep | None] = {}

    def __call__(self, batch: B) -> tuple[Tensor, int | Tensor]:
        """Set the gradients, and return the loss and the number of samples."""
        apart, self.apart = self.apart, False
        tensors = None if apart else self.tensors_of(batch)
        if tensors is None:
            if not apart:
                self.say("clients have batches of different sizes")
            return self._eager(batch)
        shape = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if shape not in self._now:
            key, steps = (shape, self.key, self._state()), self._known.steps
            if key not in steps:
                result, steps[key] = self._try(batch, tensors)
                self._now[shape] = steps[key]
                if len(steps) > KEPT:
                    steps.popitem(last=False)
                return result
            steps.move_to_end(key)
            self._now[shape] = steps[key]
        step = self._now[shape]
        return self._eager(batch) if step is None else step.replay(tensors, self.learned)

    def _state(self) -> Hashable:
        """Return where the entries are, what learns, and how the layers are set."""
        entries = [*self.model.named_parameters(), *self.model.named_buffers()]
        learned = {id(parameter) for parameter in self.learned}
        return (
            tuple((value.data_ptr(), value.requires_grad, id(value) in learned) for _, value in entries),
            tuple(
                tuple(value for value in vars(layer).values() if isinstance(value, _PLAIN))
                for layer in self.layers.modules()
            ),
            torch.are_deterministic_algorithms_enabled(),
        )

    def _try(self, batch: B, tensors: Batch) -> tuple[tuple[Tensor, int | Tensor], CapturedStep | None]:
        """Take a step by autograd, capture it, and compare; return what the step returns, and what was captured."""
        buffers = [value for _, value in self.model.named_buffers()]
        before = [value.clone() for value in buffers]
        device = tensors[0].device
        module, stream = torch.get_device_module(device), _stream(device)
        drawn = torch.get_rng_state(), module.get_rng_state(device)
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream), torch.autograd.set_multithreading_enabled(False):
            loss, count = self._eager(batch)
        module.current_stream(device).wait_stream(stream)
        gradients = [parameter.grad for parameter in self.learned]
        after = [value.clone() for value in buffers]
        wanted = [loss, *_present(gradients), *after]
        draws = not all(map(torch.equal, drawn, (torch.get_rng_state(), module.get_rng_state(device))))
        step, reason = None, "it draws at random" if draws else ""
        if not reason:
            try:
                step = self._capture(tensors, loss, stream)
                _put(buffers, before)
                for value in (step.loss, *_present(step.gradients)):
                    value.fill_(nan)  # what is not written must not pass
                result = step.replay(tensors, self.learned)
                if not _agree(wanted, [result[0], *_present(step.gradients), *buffers]):
                    step, reason = None, "replayed it has other values"
            except Exception as error:
                step, reason = None, f"{type(error).__name__}: {error}"
        if step is None:
            self.say(reason)
            _put(buffers, after)
            for parameter, gradient in zip(self.learned, gradients, strict=True):
                parameter.grad = gradient
        return (loss, count), step

    def _capture(self, tensors: Batch, loss: Tensor, stream: Any) -> CapturedStep:
        """Record both passes: nothing is computed."""
        module = torch.get_device_module(loss.device)
        kept = [None if parameter.grad is None else torch.empty_like(parameter) for parameter in self.learned]
        step = CapturedStep(
            module.CUDAGraph(), (tensors[0].clone(), tensors[1].clone()), kept, torch.empty_like(loss), 0
        )
        pool = next((other.graph.pool() for other in _ALIVE), None)
        with (
            module.graph(step.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            torch.autograd.set_multithreading_enabled(False),
        ):
            found, step.count = self.loss_of(self.batch_of(*step.batch))
            total = found.sum() if found.dim() else found
            gradients = torch.autograd.grad(total, self.learned, allow_unused=True)
            # out of the graph's own memory, in which nothing stays
            torch._foreach_copy_(_present(kept), _present(gradients))
            step.loss.copy_(found.detach())
        _ALIVE.add(step)
        return step

    def say(self, reason: str) -> None:
        """Say once for each model why its steps are taken by autograd."""
        if reason not in self._known.reasons:
            self._known.reasons.add(reason)
            log(INFO, "Steps are not captured: %s", " ".join(reason.split()))


def gradients(
    session: Session,
    loss_of: Gradients[B],
    loss_function: LossFunction,
    is_on: bool,
    tensors_of: Callable[[B], Batch | None],
    batch_of: Callable[[Tensor, Tensor], B],
) -> Gradients[B]:
    """Return what makes the gradients of a session's steps: `Replaying` on an accelerator, unless it is not on."""
    optimized = [parameter for group in session.optimizer.param_groups for parameter in group["params"]]
    learned = list({id(parameter): parameter for parameter in [*optimized, *session.learned().values()]}.values())
    if not is_on or not learned or learned[0].device.type == "cpu":
        return backward(loss_of, learned)
    layers, instruction = session.structure or session.model, session.instruction
    key, apart = (instruction.precision, loss_function), instruction.layerwise != "none"
    replaying = Replaying(session.model, layers, learned, loss_of, tensors_of, batch_of, key, apart)
    if reason := _why_not(layers, loss_function, learned[0].device):
        replaying.say(reason)
        return backward(loss_of, learned)
    return replaying


def _why_not(layers: nn.Module, loss_function: LossFunction, device: torch.device) -> str:
    """Say why steps of this model are not captured whatever they are; empty if they may be."""
    if not hasattr(torch.get_device_module(device), "CUDAGraph"):
        return f"{device.type} has no graphs"
    if not _is_known(getattr(loss_function, "function", loss_function)):
        return "the loss is not torch's"
    for layer in layers.modules():
        hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        if not _is_known(type(layer)) or "forward" in vars(layer) or hooks:
            return f"what {type(layer).__name__} does is not torch's alone"
    return ""


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream on which steps are captured, and on which libraries are made ready for that."""
    return torch.get_device_module(device).Stream(device)


def _is_known(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] in KNOWN


def _present(values: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in values if value is not None]


def _put(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _agree(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Compare in bits where the run is deterministic, else with the square root of what their dtype rounds to."""
    if torch.are_deterministic_algorithms_enabled():
        return all(map(torch.equal, wanted, found))
    for one, other in zip(wanted, found, strict=True):
        exact = not one.is_floating_point()
        within = 0.0 if exact else torch.finfo(one.dtype).eps ** 0.5 * float(one.abs().max() if one.numel() else 0)
        if not torch.allclose(one, other, rtol=0, atol=within):
            return False
    return True
