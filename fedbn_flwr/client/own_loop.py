"""Make a training loop that somebody else wrote obey an instruction.

The loop stays as it is. Three global hooks of PyTorch, which only act in the loop's own thread,
tell when its model first trains, and when its optimizer steps. What an instruction asks for happens
there.
"""

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from logging import INFO
from typing import Any, Self, cast

import torch
from flwr.common import log
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedbn_flwr import state
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


class OwnLoop:
    """While open, whatever loop this thread runs trains the model as an instruction asks.

    `structure` is a model with the same entries as the one that the loop trains, which may be
    another object. Inside the block, from the model's first forward pass in training mode on:

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
        self._entries = list(structure.state_dict())
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
        #: samples of the first mini-batch, 0 before it
        self.first_batch_size = 0
        #: the class of the first module that trained and is not the model, for the error message
        self._other = ""
        #: where a forward pass begins, and how many there were
        self._entry: nn.Module | None = None
        self._passes = 0
        #: classes of modules whose whole model was looked for
        self._searched: set[type[nn.Module]] = set()

    def __enter__(self) -> Self:
        for handle in (
            register_module_forward_pre_hook(self._before_forward),
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
                raise RuntimeError(
                    "the loop took no step of a torch.optim.Optimizer, so nothing was obeyed"
                )
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
        if threading.get_ident() != self._thread or not module.training:
            return
        if self._session is None:
            model = self._find_model(module)
            if model is not None:
                self.begin(model)
                self._entry = module
        self._passes += module is self._entry
        # modules of the data's transforms may run before the model does
        if self._session is not None and not self.first_batch_size:
            self.first_batch_size = next(
                (len(value) for value in inputs if isinstance(value, torch.Tensor)), 0
            )

    def _find_model(self, module: nn.Module) -> nn.Module | None:
        """Return the model that this module is, or is a part of, if its entries are those of the
        structure.

        A loop may call parts of its model only, as LightningModules do: of the structure, or of a
        model of its own. A module knows its parts, not its whole.
        """
        if self._is_model(module):
            return module
        self._other = self._other or type(module).__name__
        if any(part is module for part in self._structure.modules()):
            return self._structure
        if type(module) in self._searched:
            return None
        self._searched.add(type(module))
        # isinstance would ask stand-ins for modules that are deprecated, which warn
        modules = (
            cast(nn.Module, item) for item in gc.get_objects() if issubclass(type(item), nn.Module)
        )
        for whole in modules:
            if self._is_model(whole) and any(part is module for part in whole.modules()):
                return whole
        return None

    def _is_model(self, module: nn.Module) -> bool:
        return list(module.state_dict()) == self._entries

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
        """Change the gradients that this optimizer is about to take, if they are the model's."""
        if self._session is None or not self._held_by(optimizer):
            return
        self._session.optimizer = optimizer
        while self._ahead:
            self._ahead.pop(0).begin(self._session)
        self._session.steps += 1
        for rule in self._rules:
            rule.adjust()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        held = self._held_by(optimizer)
        if self._session is None or not held:
            return
        self._first_step.close()
        if self._exchange and self._session.steps == 1 and self._instruction.server_round == 1:
            log(
                INFO,
                SHARED,
                self._passes,
                type(optimizer).__name__,
                len(held),
                len(self._session.learned()),
            )

    def _held_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the model's parameters that the optimizer changes; none in another
        thread's loop.
        """
        if threading.get_ident() != self._thread or self._session is None:
            return set()
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return held & {id(parameter) for parameter in self._session.model.parameters()}

    def _require_nothing_asked(self) -> None:
        keys = set(self._instruction.binding_keys()) - {"stays", "omit", "send-personal", "later"}
        if keys:
            trained = "nothing in training mode"
            if self._other:
                trained = f"a {self._other}, whose entries are others"
            raise RuntimeError(
                f"cannot obey {', '.join(sorted(keys))}: the handler trained {trained}; `model` "
                "of the ClientApp must have the entries of the model that the handler trains"
            )


@contextmanager
def saying_training_mode() -> Iterator[None]:
    """Say once if BN of a model that this thread evaluates is in training mode."""
    thread = threading.get_ident()

    def look(module: nn.Module, _: object) -> None:
        if module.training and isinstance(module, _BatchNorm) and threading.get_ident() == thread:
            warn_once(TRAINING_MODE)

    with ExitStack() as undo:
        undo.callback(register_module_forward_pre_hook(look).remove)
        yield
