"""The clients' halves of methods: what they add to local training, switched on by keys of the
instruction.

A method's own rule lies beside its strategy. In the files here are those that any method can ask
for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform
from weakref import WeakKeyDictionary

import torch
from flwr.app import ConfigRecord
from torch import Tensor, nn

from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.device import form_of, has_graphs
from fedbn_flwr.plugins import same_definition
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import to_device
from fedbn_flwr.wire import BINDING, Instruction, Scalar, wire_key

#: the name of the proximal term's weight under Flower's own FedProx
FLOWERS_MU = "proximal-mu"
#: by model on an accelerator, and by name, tensors that its sessions have one after another
_KEPT: WeakKeyDictionary[nn.Module, dict[str, list[Tensor]]] = WeakKeyDictionary()


@dataclass
class Session:
    """One round of local training, as a rule sees it: of one client, or of several with stacked
    models.

    Stacked, every tensor has a first dimension with a row for each client, `memory` hands out and
    takes such tensors, and `structure` is a model of one client.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    instruction: Instruction
    received: Mapping[str, State]
    memory: Memory
    #: state entries that stay on the client
    stays: Collection[str] = ()
    #: how many steps the round has; stacked, if clients have different numbers, each one's
    steps: int | Tensor = 0
    #: the layers behind the parameters: the model itself, unless it is stacked
    structure: nn.Module | None = None
    #: whether all that the optimizer works with is kept
    steady: bool = False
    #: what rules add to the reply
    records: dict[str, State] = field(default_factory=dict)
    metrics: dict[str, float | list[float]] = field(default_factory=dict)

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    @property
    def stacked(self) -> bool:
        """Whether the session is one of several clients at once."""
        return self.structure is not None

    def keep(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors like these, of any values, for what steps read or write.

        Where steps can be captured the model's next session gets them again, because a captured
        step has them where they were.
        """
        if not like or not has_graphs(like[0].device):
            return [torch.empty_like(value) for value in like]
        kept = _KEPT.setdefault(self.model, {})
        if list(map(form_of, kept.get(name, ()))) != list(map(form_of, like)):
            kept[name] = [torch.empty_like(value) for value in like]
        return kept[name]

    def kept(self) -> list[Tensor]:
        """Return all tensors that are kept for the model's sessions."""
        return [value for values in _KEPT.get(self.model, {}).values() for value in values]


@dataclass(eq=False, kw_only=True)
class Rule:
    """The client half of a method: called before the first step, between gradient and step, and
    after the last step.

    A subclass is registered with `register_rule`. Its dataclass fields are keys of the instruction.
    """

    #: whether the rule works on the stacked models of several clients
    stacks: ClassVar[bool] = True
    #: whether `begin` uses the optimizer, or the very parameters that it changes: a loop of a
    #: user's own may make both after its model has run
    needs_optimizer: ClassVar[bool] = False
    #: whether all parameters that learn are its business at once: it works with one optimizer only
    needs_all: ClassVar[bool] = False
    #: whether `adjust` consists of torch's operations on gradients, parameters and what the session
    #: keeps alone, the same in every step, so that a captured step may have them in its graph
    replays: ClassVar[bool] = False
    #: rules change gradients in this order; equal ones in the alphabetical order of their keys
    order: ClassVar[int] = 0

    def begin(self, session: Session) -> None:
        """Prepare; the model holds what was received."""

    def adjust(self) -> None:
        """Change the gradients in place."""

    def finish(self, session: Session) -> None:
        """Add to the reply, or store in the node's memory."""


def on_device(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> State:
    """The entries of `state` that `like` has, on its devices and in its dtypes."""
    moved = to_device({name: state[name] for name in like if name in state}, like)
    return {name: value.to(like[name]) for name, value in moved.items()}


#: the rule behind each key; a rule's default of it switches the rule off
RULES: dict[str, type[Rule]] = {}

R = TypeVar("R", bound=Rule)


@dataclass_transform(eq_default=False, kw_only_default=True)
def register_rule(rule: type[R]) -> type[R]:
    """Make a `Rule` known to every client of this process; used as a class decorator.

    The class becomes a dataclass. Its fields are keys of the instruction, in kebab-case on the
    wire. Each has a default, with which the rule is off. A strategy switches the rule on with
    `Instruction.with_rule`:

        @register_rule
        class Pull(Rule):
            pull_strength: float = 0.0      # wire key `pull-strength`

        instruction.with_rule(pull_strength=0.1)

    A key that another rule has is a ValueError. A class that is defined again under its name, as in
    a notebook, takes the place of the one before.
    """
    made = dataclass(eq=False, kw_only=True)(rule)
    keys = _defaults(made).keys()
    old = {key: owner for key, owner in RULES.items() if same_definition(owner, made)}
    for key in keys & RULES.keys() - old.keys():
        known = ", ".join(RULES)
        raise ValueError(
            f"rule {made.__name__}: {RULES[key].__name__} has the key {key!r}; known keys: {known}"
        )
    for key in old:
        del RULES[key]
    RULES.update(dict.fromkeys(keys, made))
    return made


def rules_for(instruction: Instruction) -> list[Rule]:
    """Return new rules, those that the instruction switches on, in the order in which they change
    gradients.
    """
    rules = []
    asked = instruction.values_of(_all_defaults())
    # by name and not by time: modules may be imported in any order
    for rule in sorted({*RULES.values()}, key=lambda rule: (rule.order, min(_defaults(rule)))):
        defaults = _defaults(rule)
        values = {key: asked[key] for key in defaults}
        if values != defaults:
            rules.append(rule(**{key.replace("-", "_"): value for key, value in values.items()}))
    return rules


def read_instruction(config: ConfigRecord | dict[str, Scalar], flowers: bool = True) -> Instruction:
    """Read an instruction with the keys of all registered rules, and with that of Flower's own
    FedProx if wanted.
    """
    instruction = Instruction.from_config(config, _all_defaults())
    mu = config.get(FLOWERS_MU) if flowers else None
    if isinstance(mu, int | float):
        return instruction.with_rule(proximal_mu=mu)
    return instruction


def obeyed_keys(instruction: Instruction) -> list[str]:
    """Return the binding keys that a client of this process acts upon.

    `later` only if it knows all of its keys.
    """
    keys = instruction.binding_keys()
    later = set(filter(None, instruction.later.split(",")))
    if later and later - BINDING.keys() - _all_defaults().keys():
        return [key for key in keys if key != "later"]
    return keys


def _all_defaults() -> dict[str, Scalar]:
    return {key: default for rule in {*RULES.values()} for key, default in _defaults(rule).items()}


def _read_defaults(rule: type[Rule]) -> Mapping[str, Scalar]:
    defaults: dict[str, Any] = {wire_key(item.name): item.default for item in fields(rule)}
    if not defaults:
        raise ValueError(f"rule {rule.__name__} has no field, so no instruction could switch it on")
    for key, default in defaults.items():
        if not isinstance(default, Scalar):
            raise ValueError(
                f"rule {rule.__name__}: {key!r} needs a default that is a number, text or truth "
                "value"
            )
    return MappingProxyType(defaults)


#: once for each rule, because every message is read with them
_defaults = cast("Callable[[type[Rule]], Mapping[str, Scalar]]", cache(_read_defaults))


# every file of this folder registers its rules when it is imported
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
