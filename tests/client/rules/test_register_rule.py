"""Rules register themselves by their keys, and an instruction switches them on."""

from collections.abc import Iterator
from typing import ClassVar

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


def test_clipping_sees_what_all_other_rules_left() -> None:
    @register_rule
    class ZzzLast(Rule):
        zzz: bool = False

    asked = Instruction(momentum_state="local").with_rule(
        zzz=True, proximal_mu=0.1, clip_factor=0.1, control_variates=True, change_window=2
    )
    names = [type(rule).__name__ for rule in rules_for(asked)]
    assert names[-1] == "Clipping"
    assert sorted(names) == [
        "Clipping",
        "ControlVariates",
        "MaintainedMomentum",
        "Proximal",
        "StatisticsChange",
        "ZzzLast",
    ]


def test_the_order_is_not_that_of_registration() -> None:
    def register(*names: str) -> list[str]:
        for name in names:
            register_rule(type(name, (Rule,), {"__annotations__": {name: int}, name: 0, "__module__": __name__}))
        asked = Instruction().with_rule(first=1, second=1, third=1)
        return [type(rule).__name__ for rule in rules_for(asked)]

    assert register("third", "first", "second") == register("second", "third", "first") == ["first", "second", "third"]


def test_a_key_of_another_rule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"rule Nearer: Proximal has the key 'proximal-mu'; known keys: .*clip-factor"):

        @register_rule
        class Nearer(Rule):
            proximal_mu: float = 0.0


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


def test_a_rule_needs_a_key_with_a_default() -> None:
    with pytest.raises(ValueError, match="rule Mute has no field"):

        @register_rule
        class Mute(Rule):
            pass

    with pytest.raises(ValueError, match="rule Vague: 'pull' needs a default that is a number, text or truth value"):

        @register_rule
        class Vague(Rule):
            pull: float


def test_a_failed_registration_leaves_nothing() -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match="proximal-mu"):

        @register_rule
        class Half(Rule):
            half: float = 0.0
            proximal_mu: float = 0.0

    assert before == RULES
