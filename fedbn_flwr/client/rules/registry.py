"""The register of rules, by the instruction keys that switch them on."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

from flwr.app import ConfigRecord

from fedbn_flwr.client.rules.base import Rule
from fedbn_flwr.plugins import same_definition
from fedbn_flwr.wire import Instruction, Scalar, wire_key

#: the name of the proximal term's weight under Flower's own FedProx
FLOWERS_MU = "proximal-mu"
#: the rule behind each key
RULES: dict[str, type[Rule]] = {}
#: the default of each key, with which its rule is off
_DEFAULTS: dict[str, Scalar] = {}
#: the rules in the order in which they change gradients, with the defaults of their keys
_IN_ORDER: list[tuple[type[Rule], dict[str, Scalar]]] = []

R = TypeVar("R", bound=Rule)


@dataclass_transform(eq_default=False, kw_only_default=True)
def register_rule(rule: type[R]) -> type[R]:
    """Make a `Rule` known to every client of this process; used as a class decorator.

    The class becomes a dataclass. Its fields are keys of the instruction, in kebab-case on the wire. Each has a
    default, with which the rule is off. A strategy switches the rule on with `Instruction.with_rule`:

        @register_rule
        class Pull(Rule):
            pull_strength: float = 0.0      # wire key `pull-strength`

        instruction.with_rule(pull_strength=0.1)

    A key that another rule has is a ValueError. A class that is defined again under its name, as in a notebook, takes
    the place of the one before.
    """
    made = dataclass(eq=False, kw_only=True)(rule)
    defaults = _defaults(made)
    _refuse_taken(made, defaults)
    for key in [key for key, owner in RULES.items() if same_definition(owner, made)]:
        del RULES[key], _DEFAULTS[key]
    RULES.update(dict.fromkeys(defaults, made))
    _DEFAULTS.update(defaults)
    _IN_ORDER[:] = [entry for entry in _IN_ORDER if not same_definition(entry[0], made)]
    _IN_ORDER.append((made, defaults))
    # by name and not by time: modules may be imported in any order
    _IN_ORDER.sort(key=lambda entry: (entry[0].order, min(entry[1])))
    return made


def rules_for(instruction: Instruction) -> list[Rule]:
    """Return new rules, those that the instruction switches on, in the order in which they change gradients."""
    rules, asked = [], instruction.values_of(_DEFAULTS)
    for rule, defaults in _IN_ORDER:
        values = {key: asked[key] for key in defaults}
        if values != defaults:
            rules.append(rule(**{key.replace("-", "_"): value for key, value in values.items()}))
    return rules


def read_instruction(config: ConfigRecord | dict[str, Scalar], flowers: bool = True) -> Instruction:
    """Read an instruction with the keys of all registered rules, and with that of Flower's own FedProx if wanted."""
    instruction = Instruction.from_config(config, _DEFAULTS)
    mu = config.get(FLOWERS_MU) if flowers else None
    return instruction.with_rule(proximal_mu=mu) if isinstance(mu, int | float) else instruction


def obeyed_keys(instruction: Instruction) -> list[str]:
    """Return the binding keys that a client of this process acts upon; `later` only if it knows all of its keys."""
    known = Instruction.binding_names() | RULES.keys()
    unknown = set(filter(None, instruction.later.split(","))) - known
    return [key for key in instruction.binding_keys() if key != "later" or not unknown]


def _defaults(rule: type[Rule]) -> dict[str, Scalar]:
    defaults: dict[str, Any] = {wire_key(item.name): item.default for item in fields(rule)}
    if not defaults:
        raise ValueError(f"rule {rule.__name__} has no field, so no instruction could switch it on")
    for key, default in defaults.items():
        if not isinstance(default, Scalar):
            raise ValueError(f"rule {rule.__name__}: {key!r} needs a default that is a number, text or truth value")
    return defaults


def _refuse_taken(rule: type[Rule], keys: Iterable[str]) -> None:
    for key in keys:
        if key in RULES and not same_definition(RULES[key], rule):
            known = ", ".join(RULES)
            raise ValueError(f"rule {rule.__name__}: {RULES[key].__name__} has the key {key!r}; known keys: {known}")
