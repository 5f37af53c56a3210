"""Make a training loop that somebody else wrote obey an instruction.

The loop stays as it is. Three global hooks of PyTorch, which only act in the loop's own thread,
tell when its model first trains, and when its optimizer steps. What an instruction asks for happens
there.
"""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache
from logging import INFO
from typing import Any, Self, cast
from weakref import WeakSet

import torch
from flwr.common import log
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedbn_flwr import state, wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.reply import Metrics
from fedbn_flwr.client.rules import Rule, Session, rules_for
from fedbn_flwr.client.training import carried_exchange, carried_records, frozen, layerwise_mode
from fedbn_flwr.layerwise import Exchange, shared_statistics
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction

SHARED = (
    "BN statistics were those of all nodes in %d forward passes, up to the first step of an "
    "optimizer (%s, of %d of the %d parameters that learn)"
)


TRAINING_MODE = (
    "the evaluation runs BN in training mode, so every batch is normalized with its own "
    "statistics: call model.eval() in the handler"
)
#: numbers of an entry by which models are told apart
FEW = 1000
NO_STEP = "the loop took no step of a torch.optim.Optimizer, so nothing was obeyed"
LATE = (
    "%s begins to learn after the first step of an optimizer, and what the strategy asks for began "
    "without it: set requires_grad before"
)
NOTHING = (
    "nothing in training mode (a thread of its own or model.compile() hides a model, "
    "torch.compile(model) does not)"
)
SECOND = (
    "two models began with what was received, and the second one was trained to be sent, without "
    "what the strategy asks for: train it first, or call the other one under torch.no_grad()"
)

Told = Callable[[nn.Module, tuple[Any, ...]], None]


class _Watched(threading.local):
    """Who is told of the forward passes of a thread."""

    told: Told | None = None


_WATCHED = _Watched()


def _tell(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    # of what is compiled, the call from outside was told
    if not torch.compiler.is_compiling() and _WATCHED.told:
        _WATCHED.told(module, inputs)


@cache
def _register() -> None:
    """Register the hook of this process for good: with another one, models are compiled anew."""
    register_module_forward_pre_hook(_tell)


@contextmanager
def watching(told: Told) -> Iterator[None]:
    """Tell of each forward pass in this thread, before it begins."""
    _register()
    _WATCHED.told = told
    try:
        yield
    finally:
        _WATCHED.told = None


class OwnLoop:
    """While open, whatever loop this thread runs trains the model as an instruction asks.

    `structure` is a model with the same entries as the one that the loop trains, which may be
    another object. Of several such models, the one is meant that begins with the weights that were
    received: the node may have others, of its own. Inside the block, from that model's first
    forward pass with gradients in training mode on:

    - BN is frozen where the instruction says so,
    - the first step of a layer-wise instruction has the statistics of all clients (`exchange`
      reaches them, or the received corrections stand for them),
    - rules begin, change gradients before each step of the optimizer, and finish at the end of the
      block.

    A loop that trains no such model, or takes no step although a rule asks for one, is a
    RuntimeError: the instruction could not be obeyed.
    """

    def __init__(
        self,
        structure: nn.Module,
        instruction: Instruction,
        received: Mapping[str, State],
        memory: Memory,
        exchange: Exchange | None = None,
    ) -> None:
        self._structure = structure
        self._names = _names_of(structure)
        self._instruction = instruction
        self._received = received
        self._memory = memory
        self._exchange = exchange or carried_exchange(received, instruction)
        self._thread = threading.get_ident()
        self._session: Session | None = None
        #: what rules add to the reply, after the block
        self.records: dict[str, State] = {}
        self.metrics: Metrics = {}
        self._local = state.group_keys(structure, instruction.stays)
        self._rules = rules_for(instruction)
        self._ahead: list[Rule] = []
        self._undo = ExitStack()
        self._first_step = ExitStack()
        #: by the id of a parameter, how often an optimizer has stepped with it
        self._updates = Counter[int]()
        #: ids of the parameters that learned when an optimizer first stepped
        self._first_learned = set[int]()
        #: samples of the first mini-batch, 0 before it
        self.first_batch_size = 0
        #: the first module that trained and is not the model, in words, for the error message
        self._stranger = ""
        #: modules that were called after the model, and of them those that begin as received, too
        self._judged = WeakSet[nn.Module]()
        self._others: list[nn.Module] = []
        #: where a forward pass begins, and how many there were
        self._entry: nn.Module | None = None
        self._passes = 0
        #: modules, and classes of modules, whose whole model was looked for
        self._searched = WeakSet[object]()

    def __enter__(self) -> Self:
        self._undo.enter_context(watching(self._before_forward))
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(handle.remove)
        self._undo.push(self._first_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._undo:
            if kind is not None:
                return
            if self._session is None:
                self._require_nothing_asked()
                return
            if (self._rules or self._exchange) and not self._session.steps:
                raise RuntimeError(SECOND if self._others else NO_STEP)
            for rule in self._rules:
                rule.finish(self._session)
            self.records |= carried_records(self._exchange)

    def begin(self, model: nn.Module) -> None:
        """Begin with this model: freeze it, share its statistics, begin its rules."""
        self._undo.enter_context(frozen(model, self._instruction))
        if self._instruction.layerwise != "none":
            if self._exchange is None:
                raise ValueError(
                    "a layer-wise step needs the messages that a ClientApp of this project handles"
                )
            mode = layerwise_mode(self._instruction)
            self._first_step.enter_context(shared_statistics(model, self._exchange, mode))
        # an optimizer is known once it steps; rules that need it begin then
        nobody: Any = None
        self._session = Session(
            model, nobody, self._instruction, self._received, self._memory, self._local
        )
        self._session.records = self.records
        self._session.metrics = self.metrics
        self._ahead = [rule for rule in self._rules if rule.needs_optimizer]
        for rule in self._rules:
            if not rule.needs_optimizer:
                rule.begin(self._session)

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        module = getattr(module, "_orig_mod", module)  # of what is compiled
        if not module.training:
            return
        if torch.is_grad_enabled():
            self._look_at(module)
        self._passes += module is self._entry
        # modules of the data's transforms may run before the model does
        if self._session is not None and not self.first_batch_size:
            self.first_batch_size = next(
                (len(value) for value in inputs if isinstance(value, torch.Tensor)), 0
            )

    def _look_at(self, module: nn.Module) -> None:
        """Begin if this is the model that is meant, and take note of others."""
        if self._session is None:
            model = self._find_model(module)
            if model is not None:
                self.begin(model)
                self._entry = module
        elif module not in self._judged:
            self._judged.add(module)
            if self._is_another(module, self._session.model):
                self._others.append(module)

    def _find_model(self, module: nn.Module) -> nn.Module | None:
        """Return the model that this module is, or is a part of, if its entries are those of the
        structure, and its weights those that were received.
        """
        whole = self._find_whole(module)
        if whole is None:
            stranger = f"a {type(module).__name__}, whose entries are others"
        elif self._begins_as_received(whole):
            return whole
        else:
            stranger = f"a {type(whole).__name__} that does not begin with the received weights"
        self._stranger = self._stranger or stranger
        return None

    def _find_whole(self, module: nn.Module) -> nn.Module | None:
        """Return the model with the entries of the structure that this module is, or a part of.

        A loop may call parts of its model only, as LightningModules do: of the structure, or of a
        model of its own. A module knows its parts, not its whole.
        """
        if self._is_model(module):
            return module
        if any(part is module for part in self._structure.modules()):
            return self._structure
        if module in self._searched or type(module) in self._searched:
            return None
        self._searched.add(module)
        # isinstance would ask stand-ins for modules that are deprecated, which warn
        modules = (
            cast(nn.Module, item) for item in gc.get_objects() if issubclass(type(item), nn.Module)
        )
        for whole in modules:
            if self._is_model(whole) and any(part is module for part in whole.modules()):
                return whole
        self._searched.add(type(module))
        return None

    def _is_model(self, module: nn.Module) -> bool:
        return _names_of(module) == self._names

    def _begins_as_received(self, model: nn.Module) -> bool:
        """Return whether a model learns, and half of its weights or more are what was received, as
        far as the first `FEW` of each entry tell.
        """
        given = self._received.get(wire.ARRAYS, {})
        learns = False
        total = equal = 0
        for name, parameter in model.named_parameters():
            learns |= parameter.requires_grad
            if name in given:
                here = parameter.detach().reshape(-1)[:FEW]
                total += len(here)
                if parameter.shape == given[name].shape:
                    same = here == given[name].reshape(-1)[:FEW].to(here)
                    equal += int(same.sum())
        return learns and 2 * equal >= total

    def _is_another(self, module: nn.Module, model: nn.Module) -> bool:
        """Return whether a module trains from what was received, beside the model that does."""
        return (
            type(module) is type(model)
            and module is not model
            and self._is_model(module)
            and self._begins_as_received(module)
        )

    def refuse_another(self, sent: State) -> None:
        """Refuse a reply with another model than the one for which the instruction was obeyed."""
        if self._session is None or not self._binding():
            return
        if not _is_state_of(self._session.model, sent) and any(
            _is_state_of(other, sent) for other in self._others
        ):
            raise RuntimeError(SECOND)

    def _binding(self) -> list[str]:
        """Return what was asked for that only training obeys."""
        return sorted(
            {*self._instruction.binding_keys()} - {"stays", "omit", "send-personal", "later"}
        )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = options.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._adjust(optimizer)
            return None

        # the model may train for the first time in here
        def adjusted() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._adjust(optimizer)
            return loss

        return (args[0], adjusted), {}

    def _adjust(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step, and let rules change the gradients that it is about to take."""
        held = self._held_by(optimizer)
        if self._session is None or not held or _overflowed(optimizer):
            return
        self._session.optimizer = optimizer
        self._begin_rules(self._session, held)
        self._updates.update(held)
        self._session.steps = max(self._updates.values())
        if self._rules:
            _unscale(optimizer)
            self._change_gradients(self._session.model, held)

    def _change_gradients(self, model: nn.Module, held: set[int]) -> None:
        """Let rules change the gradients of these parameters, as if others had none."""
        others = [value for value in model.parameters() if id(value) not in held]
        if any(id(value) in self._updates for value in others):
            self._refuse_parts()
        gradients = [value.grad for value in others]
        for value in others:
            value.grad = None
        for rule in self._rules:
            rule.adjust()
        for value, gradient in zip(others, gradients, strict=True):
            value.grad = gradient

    def _begin_rules(self, session: Session, held: set[int]) -> None:
        """Begin the rules that wait for an optimizer; refuse parameters that learn only later."""
        if not self._updates:
            self._first_learned = {id(value) for value in session.learned().values()}
        late = held - self._first_learned
        if late and any(rule.needs_optimizer for rule in self._rules):
            for name, value in session.learned().items():
                if id(value) in late:
                    raise RuntimeError(LATE % name)
        while self._ahead:
            self._ahead.pop(0).begin(session)

    def _refuse_parts(self) -> None:
        """Refuse a second optimizer under a rule that needs all parameters."""
        for rule in self._rules:
            if rule.needs_all:
                options = ", ".join(option.name for option in fields(rule))
                raise RuntimeError(
                    f"the loop has several optimizers, and {options} needs one for all parameters "
                    "(with param groups)"
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        held = self._held_by(optimizer)
        if self._session is None or not held or _overflowed(optimizer):
            return
        self._first_step.close()
        if self._exchange and self._session.steps == 1 and self._instruction.server_round == 1:
            log(
                INFO,
                SHARED,
                self._passes,
                type(optimizer).__name__,
                len(held & self._first_learned),
                len(self._first_learned),
            )

    def _held_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the model's parameters that the optimizer changes; none in another
        thread's loop, or if it has another optimizer that does, as SAM and Lookahead do.
        """
        if threading.get_ident() != self._thread or self._session is None:
            return set()
        if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
            return set()
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return held & {id(parameter) for parameter in self._session.model.parameters()}

    def _require_nothing_asked(self) -> None:
        keys = self._binding()
        if keys:
            trained = self._stranger or NOTHING
            raise RuntimeError(
                f"cannot obey {', '.join(keys)}: the handler trained {trained}; it must train, "
                "from what it received, a model with the entries of the ClientApp's `model`"
            )


def _names_of(model: nn.Module) -> list[str]:
    """Return what tells models apart.

    A wrapper, as of Lightning's Fabric, may have the entries of the model that it wraps, but its
    parameters have names of its own.
    """
    parameters = [name for name, _ in model.named_parameters()]
    return [*model.state_dict(), *parameters]


def _overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is called, but will not step.

    `GradScaler` leaves it to fused optimizers to scale gradients back, and to do nothing where one
    is not finite.
    """
    return bool(getattr(optimizer, "found_inf", False))


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    """Scale gradients back, where a fused optimizer would do so, and tell it that this is done."""
    fused: Any = optimizer
    scale = getattr(fused, "grad_scale", None)
    if scale is None:
        return
    for group in fused.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.device))
    fused.grad_scale = None


def _is_state_of(model: nn.Module, sent: State) -> bool:
    """Return whether a model has the parameters that were sent."""
    return all(
        torch.equal(parameter.detach().cpu().to(sent[name].dtype), sent[name].cpu())
        for name, parameter in model.named_parameters()
        if name in sent
    )


@contextmanager
def saying_training_mode() -> Iterator[None]:
    """Say once if BN of a model that this thread evaluates is in training mode."""

    def look(module: nn.Module, _: object) -> None:
        if module.training and isinstance(module, _BatchNorm):
            warn_once(TRAINING_MODE)

    with watching(look):
        yield
