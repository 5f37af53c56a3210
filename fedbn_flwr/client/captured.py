"""A training step on an accelerator: recorded once, and replayed in every step that is equal.

Most of a small model's step on a GPU is Python that launches hundreds of short operations; a graph
of them is launched at once. It has both passes, then those rules that replay, and the optimizer's
step, if all rules do and what it works with is kept. The rest follows. A captured step has the bits
of the same step by autograd, and proves it where it runs: at its first use both are taken on the
same batch, and if they differ it is not used. The client or stack that meets a step first takes it
by autograd: what comes once only is not worth a capture.

Layers of a user's own may do something else in a later step, by a count or a branch in Python. So
they are captured only if that is asked for (`always`), and are compared again and again.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from logging import INFO, WARNING
from math import nan
from typing import Any, Generic, Literal, TypeVar
from warnings import catch_warnings, simplefilter
from weakref import WeakKeyDictionary, WeakSet

import torch
from flwr.common import log
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedbn_flwr.client.rules import Rule, Session
from fedbn_flwr.client.training import Change, Loss, LossFunction, Step, by_autograd
from fedbn_flwr.device import form_of, has_graphs
from fedbn_flwr.randomness import OwnRandomness

#: which steps are captured: those of layers that are known, of all layers, or of none
Captured = Literal["auto", "always", "never"]
#: steps of a model that are kept, the latest
KEPT = 64
#: packages whose layers do the same whenever they are called, or draw at random, which is noticed
KNOWN = ("fedbn_flwr", "timm", "torch", "torchvision")
#: attributes of layers on which their passes may depend
_PLAIN = (bool, int, float, str, tuple, type(None))
#: what precisions round to, in which equal passes may differ where a run is not deterministic
_ROUNDING = {"float32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7}

#: inputs and targets, and what else a step reads that is another in each
Tensors = tuple[Tensor, ...]
B = TypeVar("B")


@dataclass(eq=False)
class CapturedStep:
    """A graph of a step, and the tensors that it reads and writes."""

    graph: Any
    #: the batch that it reads, and its tensors
    batch: Any
    tensors: Tensors
    gradients: Sequence[Tensor | None]
    #: how often it was replayed
    taken: int = 0
    #: whether a replay had other values than the same step by autograd
    differs: bool = False

    def replay(self, tensors: Tensors, learned: Sequence[nn.Parameter]) -> None:
        """Take the step on another batch."""
        self.taken += 1
        _put(self.tensors, tensors)
        self.graph.replay()
        for parameter, gradient in zip(learned, self.gradients, strict=True):
            parameter.grad = gradient


class _Captures:
    """What is known of a model's steps, and said reasons."""

    def __init__(self) -> None:
        #: those that were captured, None for those that cannot be, and NEW ones
        self.steps: OrderedDict[Hashable, CapturedStep | str | None] = OrderedDict()
        self.reasons: set[str] = set()
        #: by id, parameters, and the gradients that all of the steps write
        self._gradients: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return where replays write a parameter's gradient: no two steps are taken at once."""
        if id(parameter) not in self._gradients:
            made = torch.empty_like(parameter)
            self._gradients[id(parameter)] = parameter, made
        return self._gradients[id(parameter)][1]

    def say(self, reason: str) -> None:
        """Say once why steps are taken by autograd."""
        if reason not in self.reasons:
            self.reasons.add(reason)
            log(INFO, "Steps are not captured: %s", " ".join(reason.split()))


def account() -> tuple[bool, set[str]]:
    """Return whether this process has captured steps, and why others were not."""
    every = [*_OF_MODELS.values()]
    captured = any(
        isinstance(step, CapturedStep) for known in every for step in known.steps.values()
    )
    return captured, {reason for known in every for reason in known.reasons}


NEW = "new"
OTHER_VALUES = "replayed it has other values"
CHANGED = (
    "Steps are not captured from here on: after %d of them, one has other values by autograd, so "
    "that the model does something else in each. What was trained may be wrong: use captured=never"
)
_OF_MODELS: WeakKeyDictionary[nn.Module, _Captures] = WeakKeyDictionary()
#: all that are alive share one memory: no two of them are replayed at once, and none keeps anything
#: in it
_ALIVE: WeakSet[CapturedStep] = WeakSet()
#: graphs whose capture failed in the middle: torch may be left with them, and nothing is captured
#: afterwards
_BROKEN: list[Any] = []


def steps(
    session: Session,
    rules: Sequence[Rule],
    loss_of: Loss[B],
    loss_function: LossFunction,
    wanted: Captured,
    tensors_of: Callable[[B], tuple[Hashable, Tensors]],
    batch_of: Callable[[B, Tensors], B],
    asks_nobody: bool = False,
    written: Callable[[], Sequence[Tensor]] = tuple,
) -> Step[B]:
    """Return what takes a session's steps: replays on an accelerator, where these are on and can
    be.

    `tensors_of` returns what kind of batch one is, and its tensors; `batch_of` makes a batch of
    this kind of others. A layer-wise step is taken by autograd, unless it `asks_nobody`. Beside
    what training changes and the session keeps, steps write what `written` returns.
    """
    optimized = [
        parameter for group in session.optimizer.param_groups for parameter in group["params"]
    ]
    every = {
        id(parameter): parameter for parameter in [*optimized, *session.learned().values()]
    }.values()
    learned = [parameter for parameter in every if parameter.requires_grad]
    changing = [rule for rule in rules if type(rule).adjust is not Rule.adjust]
    changes: list[Change] = [rule.adjust for rule in changing]
    changes.append(session.optimizer.step)
    eager = by_autograd(loss_of, learned, changes)
    if wanted == "never" or _BROKEN or not learned or learned[0].device.type == "cpu":
        return eager
    known = _OF_MODELS.setdefault(session.model, _Captures())
    layers = session.structure or session.model
    reason = _why_not(layers, learned[0].device, session.stacked)
    if not reason and wanted == "auto":
        reason = _what_is_unknown(layers, loss_function)
    if reason:
        known.say(reason)
        return eager
    replayed = list(takewhile(lambda rule: rule.replays, changing))
    whole = session.steady and replayed == changing
    inside = changes
    if not whole:
        inside = changes[: len(replayed)]
    return _Replaying(
        session,
        replayed,
        whole,
        learned,
        loss_of,
        inside,
        by_autograd(loss_of, learned, inside),
        changes[len(inside) :],
        tensors_of,
        batch_of,
        loss_function,
        known,
        asks_nobody,
        wanted == "always",
        written,
    )


def replays(step: Step[B]) -> bool:
    """Return whether what takes steps may capture them, and replay them."""
    return isinstance(step, _Replaying)


@dataclass(eq=False)
class _Replaying(Generic[B]):
    """Takes steps by replaying captured ones where it can, and else by autograd."""

    session: Session
    #: those that are replayed
    rules: Sequence[Rule]
    #: whether the optimizer's step is, too
    whole: bool
    learned: Sequence[nn.Parameter]
    loss_of: Loss[B]
    #: what is replayed after both passes
    changes: Sequence[Change]
    #: takes by autograd what is replayed
    eager: Loss[B]
    #: what follows a replay
    after: Sequence[Change]
    tensors_of: Callable[[B], tuple[Hashable, Tensors]]
    batch_of: Callable[[B, Tensors], B]
    loss_function: LossFunction
    known: _Captures
    asks_nobody: bool
    doubts: bool
    written: Callable[[], Sequence[Tensor]]

    def __post_init__(self) -> None:
        #: what makes the next step unlike the others: its layer-wise mode
        self._mode = self.session.instruction.layerwise
        #: of this session, by the form of the batch and the mode
        self._steps: dict[Hashable, CapturedStep | str | None] = {}

    def __call__(self, batch: B) -> None:
        """Take a step."""
        self._take(batch)
        for change in self.after:
            change()

    def _take(self, batch: B) -> None:
        mode = self._mode
        self._mode = "none"
        if mode != "none" and not self.asks_nobody:
            self.eager(batch)
            return
        kind, tensors = self.tensors_of(batch)
        forms = tuple(map(form_of, tensors))
        shape = kind, forms, mode
        if shape not in self._steps:
            key = (shape, self._state())
            steps = self.known.steps
            if steps.get(key) is NEW and not _BROKEN:  # since an earlier session
                self._steps[shape] = steps[key] = self._try(batch, tensors)
                return
            self._steps[shape] = steps[key] = steps.pop(key, NEW)
            if len(steps) > KEPT:
                steps.popitem(last=False)
        step = self._steps[shape]
        if not isinstance(step, CapturedStep) or step.differs:
            self.eager(batch)
        elif self.doubts and step.taken.bit_count() == 1:  # 1, 2, 4, ...
            self._check(batch, tensors, step)
        else:
            step.replay(tensors, self.learned)

    def _state(self) -> Hashable:
        """Return all else that a step depends on: where what it reads and writes lies, what learns,
        and how layers, rules and the optimizer are set.
        """
        session = self.session
        loss = self.loss_function
        own = [loss] if isinstance(loss, nn.Module) else []
        holders = [session.model, *own]
        entries = [
            value for module in holders for value in (*module.parameters(), *module.buffers())
        ]
        layers = [
            layer
            for module in (session.structure or session.model, *own)
            for layer in module.modules()
        ]
        plain = []
        for layer in layers:
            plain.append([value for value in vars(layer).values() if isinstance(value, _PLAIN)])
        return (
            tuple((value.data_ptr(), value.requires_grad) for value in entries),
            tuple(id(parameter) for parameter in self.learned),
            tuple(map(type, layers)),
            repr(plain),
            tuple(value.data_ptr() for value in session.kept()),
            None if own else loss,
            tuple(map(repr, self.rules)),
            self._settings(),
            (session.instruction.precision, torch.are_deterministic_algorithms_enabled()),
        )

    def _settings(self) -> Hashable:
        """Return what a replay of the optimizer's step depends on, beside the rate."""
        if not self.whole:
            return ()
        optimizer = self.session.optimizer
        settings = []
        for group in optimizer.param_groups:
            given = {name: group[name] for name in group.keys() - {"lr", "params"}}
            settings.append((repr(sorted(given.items())), tuple(map(id, group["params"]))))
        places = [
            value.data_ptr() for state in optimizer.state.values() for value in state.values()
        ]
        return type(optimizer), tuple(settings), tuple(places)

    def _try(self, batch: B, tensors: Tensors) -> CapturedStep | str | None:
        """Take a step by autograd, capture it, and compare; return what is known now."""
        buffers = self._written()
        device = tensors[0].device
        module = torch.get_device_module(device)
        stream = _stream(device)
        before = _copies(buffers)
        drawn = torch.get_rng_state(), module.get_rng_state(device)
        times = OwnRandomness.times
        stream.wait_stream(module.current_stream(device))
        with (
            module.stream(stream),
            torch.autograd.set_multithreading_enabled(False),
            _waits(module) as waits,
        ):
            loss = self.eager(batch)
        module.current_stream(device).wait_stream(stream)
        made = [parameter.grad for parameter in self.learned]
        after = _copies(buffers)
        if not loss.isfinite():
            return NEW
        now = torch.get_rng_state(), module.get_rng_state(device)
        draws = times != OwnRandomness.times or not all(map(torch.equal, drawn, now))
        reason = ""
        if draws:
            reason = "it draws at random"
        elif waits:
            reason = "the host waits for the device"
        step = None
        if not reason:
            try:
                step = self._capture(batch, tensors, stream)
                _put(buffers, before)
                if not self._ends_at(step, tensors, [*_present(made), *after]):
                    reason = OTHER_VALUES
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        if reason:
            self.known.say(reason)
            self._put_back(made, after)
            return None
        return step

    def _check(self, batch: B, tensors: Tensors, step: CapturedStep) -> None:
        """Take a step by autograd, and compare it with the replay."""
        buffers = self._written()
        before = _copies(buffers)
        self.eager(batch)
        made = [parameter.grad for parameter in self.learned]
        after = _copies(buffers)
        _put(buffers, before)
        if not self._ends_at(step, tensors, [*_present(made), *after]):
            step.differs = True
            self._put_back(made, after)
            self.known.reasons.add(OTHER_VALUES)
            log(WARNING, CHANGED, step.taken)

    def _written(self) -> list[Tensor]:
        """Return what steps write beside gradients."""
        moved = []
        if self.whole:
            moved = [parameter.detach() for parameter in self.learned]
        return [*self.session.model.buffers(), *self.session.kept(), *moved, *self.written()]

    def _ends_at(self, step: CapturedStep, tensors: Tensors, wanted: Sequence[Tensor]) -> bool:
        """Replay a step, and compare the gradients and what else it writes."""
        for value in _present(step.gradients):
            value.fill_(nan)  # what is not written must not pass
        step.replay(tensors, self.learned)
        return self._agree(wanted, [*_present(step.gradients), *self._written()])

    def _put_back(self, gradients: Sequence[Tensor | None], buffers: Sequence[Tensor]) -> None:
        """Go on as after the step by autograd."""
        _put(self._written(), buffers)
        for parameter, gradient in zip(self.learned, gradients, strict=True):
            parameter.grad = gradient

    def _agree(self, wanted: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
        """Compare in bits where the run is deterministic, else with the square root of what its
        precision rounds to.
        """
        if torch.are_deterministic_algorithms_enabled():
            return all(map(torch.equal, wanted, found))
        share = _ROUNDING[self.session.instruction.precision] ** 0.5
        most = [share * float(value.abs().max()) if value.numel() else 0.0 for value in wanted]
        return all(
            torch.allclose(one, other, 0, much)
            for one, other, much in zip(wanted, found, most, strict=True)
        )

    def _capture(self, like: B, tensors: Tensors, stream: Any) -> CapturedStep:
        """Record a step: nothing is computed."""
        device = tensors[0].device
        module = torch.get_device_module(device)
        read = tuple(_copies(tensors))
        kept = [
            None if parameter.grad is None else self.known.gradient(parameter)
            for parameter in self.learned
        ]
        step = CapturedStep(module.CUDAGraph(), self.batch_of(like, read), read, kept)
        pool = next((other.graph.pool() for other in _ALIVE), None)
        _BROKEN.append(step.graph)
        with (
            # older torch does not go back to it after a failure
            module.stream(module.current_stream(device)),
            module.graph(step.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            torch.autograd.set_multithreading_enabled(False),
        ):
            loss = self.loss_of(step.batch)
            gradients = torch.autograd.grad(loss, self.learned, allow_unused=True)
            # out of the graph's own memory, in which nothing stays
            torch._foreach_copy_(_present(kept), _present(gradients))
            for parameter, gradient in zip(self.learned, kept, strict=True):
                parameter.grad = gradient
            for change in self.changes:
                change()
        _BROKEN.remove(step.graph)
        _ALIVE.add(step)
        return step


def _why_not(layers: nn.Module, device: torch.device, stacked: bool) -> str:
    """Say why steps of this model are not captured whatever is wanted; empty if they may be.

    Stacks draw the masks of dropout ahead of a step.
    """
    if not has_graphs(device):
        return f"{device.type} has no graphs"
    for layer in layers.modules():
        hooks = (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        )
        if isinstance(layer, _DropoutNd) and layer.p > 0 and not stacked:
            return "it draws at random"
        if "forward" in vars(layer) or hooks:
            return f"what {type(layer).__name__} does is not torch's alone"
    return ""


def _what_is_unknown(layers: nn.Module, loss_function: LossFunction) -> str:
    """Name what may do something else in a later step; empty if there is nothing."""
    if not _is_known(getattr(loss_function, "function", loss_function)):
        return "the loss is not torch's"
    for layer in layers.modules():
        if not _is_known(type(layer)):
            return f"what {type(layer).__name__} does is not torch's alone (captured=always tries)"
    return ""


def _is_known(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] in KNOWN


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream on which steps are captured, and on which libraries are made ready for
    that.
    """
    return torch.get_device_module(device).Stream(device)


@contextmanager
def _waits(module: Any) -> Iterator[list[Any]]:
    """Give a list of the waits for the device inside the block, where the device tells: they would
    break a capture.
    """
    before = getattr(module, "get_sync_debug_mode", int)()
    with catch_warnings(record=True) as seen:
        simplefilter("always")
        getattr(module, "set_sync_debug_mode", int)(1)
        try:
            yield (waits := list[Any]())
        finally:
            getattr(module, "set_sync_debug_mode", int)(before)
    # torch's own word about the mode, once a process, speaks of synchronizing, too
    waits += [each for each in seen if "called a synchronizing" in str(each.message)]


def _present(values: Iterable[Tensor | None]) -> list[Tensor]:
    return [value for value in values if value is not None]


def _copies(values: Iterable[Tensor]) -> list[Tensor]:
    return [value.clone() for value in values]


def _put(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
