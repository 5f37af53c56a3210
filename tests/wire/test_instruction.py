"""The wire format: instructions survive the journey, and say no to what they cannot mean."""

import re
from dataclasses import Field, fields, replace
from typing import Any

import pytest
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.wire import Instruction, wire_key

FIELDS = {item.name: item for item in fields(Instruction) if item.name != "rule_keys"}
#: keys that say how to train, not which method it is
SHARED = {
    "server-round",
    "seed",
    "local-steps",
    "local-epochs",
    "batch-size",
    "optimizer",
    "lr",
    "weight-decay",
}

VALUES: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
}


def other(item: "Field[Any]") -> Any:
    """A value that is not the field's default."""
    kind = type(item.default)
    return {bool: not item.default, int: 7, float: 0.625, str: f"not {item.default}"}[kind]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_travels_under_its_kebab_name_and_comes_back(name: str) -> None:
    sent = replace(Instruction(), **{name: other(FIELDS[name])})
    config = sent.to_config()
    assert list(config) == [("fedbn." if sent.binding_keys() else "") + wire_key(name)]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", wire_key(name))
    assert Instruction.from_config(config) == sent


@settings(max_examples=25)
@given(st.fixed_dictionaries({name: VALUES[type(item.default)] for name, item in FIELDS.items()}))
def test_any_instruction_survives_flowers_serialization(values: dict[str, Any]) -> None:
    sent = Instruction(**values)
    received = ConfigRecord.inflate(sent.to_config().deflate())
    assert Instruction.from_config(received) == sent


def test_flowers_own_names_are_kept() -> None:
    assert Instruction(server_round=3).to_config() == {"server-round": 3}
    assert read_instruction({"proximal-mu": 0.5}) == Instruction().with_rule(proximal_mu=0.5)
    assert read_instruction({"proximal-mu": 0.5}, flowers=False) == Instruction()


def test_wire_keys_are_those_of_all_fields() -> None:
    assert {key.removeprefix("fedbn.") for key in Instruction.wire_keys()} == {
        wire_key(name) for name in FIELDS
    }


def test_what_changes_the_method_leaves_its_names_to_users() -> None:
    mine = {
        "freeze": [1, 2],
        "stays": 3,
        "omit": b"",
        "layerwise": "no",
        "pull": "hard",
        "proximal-mu": "soft",
    }
    assert Instruction.from_config(mine, {"pull": 0.0, "proximal-mu": 0.0}) == Instruction()
    theirs = Instruction(freeze="both").with_rule(pull=0.5).to_config()
    assert theirs == {"fedbn.freeze": "both", "fedbn.pull": 0.5}
    assert Instruction.from_config({**mine, **theirs}, {"pull": 0.0}) == Instruction(
        freeze="both"
    ).with_rule(pull=0.5)


def test_binding_are_the_keys_in_force_that_change_the_method() -> None:
    assert Instruction().binding_keys() == []
    instruction = Instruction(lr=0.5, freeze="statistics", omit="statistics").with_rule(
        proximal_mu=0.1
    )
    assert instruction.binding_keys() == ["freeze", "omit", "proximal-mu"]


def test_what_changes_the_method_is_binding_and_how_to_train_is_not() -> None:
    everything = Instruction(**{name: other(item) for name, item in FIELDS.items()})
    assert SHARED.isdisjoint(everything.binding_keys())
    assert {"freeze", "stays", "omit", "send-personal"} <= set(everything.binding_keys())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("local-steps", 5.0),
        ("local-steps", True),
        ("local-steps", "5"),
        ("lr", "0.1"),
        ("lr", True),
        ("replacement", 1),
        ("replacement", "true"),
        ("optimizer", 1),
        ("fedbn.freeze", True),
        ("fedbn.stays", ["bn"]),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"'{key}' must be (int|float|bool|str), got {re.escape(repr(value))}"
    ):
        Instruction.from_config({key: value})


def test_a_whole_number_is_a_number() -> None:
    instruction = Instruction.from_config({"lr": 1})
    assert instruction.lr == 1.0
    assert isinstance(instruction.lr, float)


def test_keys_of_others_are_left_alone() -> None:
    assert Instruction.from_config(
        {"lr": 0.5, "my-own-key": "anything", "freezer": "full"}
    ) == Instruction(lr=0.5)


# ---- keys of rules -------------------------------------------------------------------------------


def test_a_rules_key_travels_is_binding_and_comes_back_where_it_is_known() -> None:
    sent = Instruction(lr=0.5).with_rule(pull_strength=0.25).with_rule(pull_often=True)
    assert sent.to_config() == {"lr": 0.5, "fedbn.pull-strength": 0.25, "fedbn.pull-often": True}
    assert sent.binding_keys() == ["pull-often", "pull-strength"]
    received = ConfigRecord.inflate(sent.to_config().deflate())
    assert Instruction.from_config(received, {"pull-strength": 0.0, "pull-often": False}) == sent
    partly = Instruction.from_config(received, {"pull-strength": 0.0})
    assert partly.binding_keys() == ["pull-strength"]
    assert Instruction.from_config(received).binding_keys() == []


def test_a_rules_key_has_the_type_of_its_default() -> None:
    (value,) = (
        Instruction.from_config({"fedbn.pull": 1}, {"pull": 0.0}).values_of({"pull": 0.0}).values()
    )
    assert (type(value), value) == (float, 1.0)
    with pytest.raises(ValueError, match=r"'fedbn\.pull' must be float, got 'hard'"):
        Instruction.from_config({"fedbn.pull": "hard"}, {"pull": 0.0})


def test_values_are_found_by_key() -> None:
    instruction = Instruction(lr=0.5).with_rule(pull=2)
    assert instruction.values_of({"lr": 0.1, "pull": 0, "push": 0}) == {
        "lr": 0.5,
        "pull": 2,
        "push": 0,
    }


def test_a_later_order_to_a_rule_takes_the_place_of_the_one_before() -> None:
    later, once = (
        Instruction().with_rule(pull=1, push=3).with_rule(pull=2),
        Instruction().with_rule(push=3, pull=2),
    )
    assert later.to_config() == {"fedbn.pull": 2, "fedbn.push": 3}
    assert (later, hash(later)) == (once, hash(once))


def test_a_field_is_no_rules_key() -> None:
    with pytest.raises(ValueError, match="'lr' is a field of Instruction"):
        Instruction().with_rule(lr=0.5)
