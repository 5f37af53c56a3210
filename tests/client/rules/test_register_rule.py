"""Rules register themselves by their keys, and an instruction switches them on."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from fedbn_flwr.client.rules import RULES, Rule, Session, read_instruction, register_rule, rules_for
from fedbn_flwr.wire import Instruction
from tests.helpers.registered import registries_restored


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget what a test registers."""
    with registries_restored():
        yield


def test_a_rule_is_on_when_one_of_its_keys_is_not_at_its_default() -> None:
    @register_rule
    class Pull(Rule):
        pull_strength: float = 0.0
        pull_kind: str = "even"

    off = Instruction().with_rule(pull_strength=0.0, pull_kind="even")
    assert rules_for(off) == []
    (rule,) = rules_for(Instruction().with_rule(pull_strength=0.5))
    assert isinstance(rule, Pull)
    assert (rule.pull_strength, rule.pull_kind) == (0.5, "even")
    (rule,) = rules_for(read_instruction({"fedbn.pull-kind": "odd", "pull-strength": 3}))
    assert isinstance(rule, Pull)
    assert (rule.pull_strength, rule.pull_kind) == (0.0, "odd")


def test_a_rules_field_may_be_one_of_the_instruction() -> None:
    instruction = read_instruction(Instruction(momentum_state="local").to_config())
    assert instruction == Instruction(momentum_state="local")
    assert instruction.binding_keys() == ["momentum-state"]
    (rule,) = rules_for(instruction)
    assert rule.momentum_state == "local"  # type: ignore[attr-defined]


def register(name: str, **keys: Any) -> type[Rule]:
    """Register a rule with these keys; a type in the place of a default is a key without one."""
    kinds = {key: value if isinstance(value, type) else type(value) for key, value in keys.items()}
    defaults = {key: value for key, value in keys.items() if not isinstance(value, type)}
    return register_rule(type(name, (Rule,), {"__annotations__": kinds, **defaults, "__module__": __name__}))


def test_the_order_is_not_that_of_registration_and_bounds_are_last() -> None:
    def order(*names: str) -> list[str]:
        for name in names:
            register(name, **{name: 0})
        asked = Instruction().with_rule(first=1, second=1, zzz=1, clip_factor=0.1, clip_norm=0.1)
        return [type(rule).__name__ for rule in rules_for(asked)]

    wanted = ["first", "second", "zzz", "Clipping", "GradientNorm"]
    assert order("zzz", "first", "second") == order("second", "zzz", "first") == wanted


def test_a_class_that_is_defined_again_takes_the_place_of_the_one_before() -> None:
    for strength in (1.0, 2.0):

        @register_rule
        class Pull(Rule):
            pull: bool = False
            times: ClassVar[float] = strength

            def begin(self, session: Session) -> None:
                """Do nothing."""

    (rule,) = rules_for(Instruction().with_rule(pull=True))
    assert rule.times == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"half": 0.0, "proximal_mu": 0.0}, "Proximal has the key 'proximal-mu'; known keys: .*clip-factor"),
        ({}, "has no field"),
        ({"pull": float}, "'pull' needs a default that is a number, text or truth value"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_and_leaves_nothing(keys: dict[str, Any], message: str) -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=f"rule Mine:? {message}"):
        register("Mine", **keys)
    assert before == RULES
