"""The wire format: instructions survive the journey, and say no to what they cannot mean."""

import re
from dataclasses import Field, fields, replace
from typing import Any

import pytest
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.wire import Instruction, wire_key

FIELDS = {item.name: item for item in fields(Instruction)}
#: keys that say how to train, not which method it is
SHARED = {"server-round", "seed", "local-steps", "local-epochs", "batch-size", "optimizer", "lr", "weight-decay"}

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
    assert list(config) == [wire_key(name)]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", wire_key(name))
    assert Instruction.from_config(config) == sent


@settings(max_examples=25)
@given(st.fixed_dictionaries({name: VALUES[type(item.default)] for name, item in FIELDS.items()}))
def test_any_instruction_survives_flowers_serialization(values: dict[str, Any]) -> None:
    sent = Instruction(**values)
    received = ConfigRecord.inflate(sent.to_config().deflate())
    assert Instruction.from_config(received) == sent


def test_flowers_own_names_are_kept() -> None:
    assert Instruction(server_round=3, proximal_mu=0.5).to_config() == {"server-round": 3, "proximal-mu": 0.5}


def test_defaults_are_not_sent() -> None:
    assert Instruction().to_config() == {}
    assert Instruction.from_config(ConfigRecord()) == Instruction()


def test_wire_keys_are_those_of_all_fields() -> None:
    assert Instruction.wire_keys() == {wire_key(name) for name in FIELDS}


def test_binding_are_the_keys_in_force_that_change_the_method() -> None:
    assert Instruction().binding_keys() == []
    instruction = Instruction(lr=0.5, freeze="statistics", omit="statistics", proximal_mu=0.1)
    assert instruction.binding_keys() == ["freeze", "omit", "proximal-mu"]


@pytest.mark.parametrize("name", ["proximal_mu", "freeze", "keep_local", "omit", "send_personal"])
def test_what_changes_the_method_is_binding(name: str) -> None:
    assert replace(Instruction(), **{name: other(FIELDS[name])}).binding_keys() == [wire_key(name)]


def test_how_to_train_is_not_binding() -> None:
    everything = Instruction(**{name: other(item) for name, item in FIELDS.items()})
    assert SHARED.isdisjoint(everything.binding_keys())


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
        ("freeze", True),
        ("keep-local", ["bn"]),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"'{key}' must be (int|float|bool|str), got {re.escape(repr(value))}"):
        Instruction.from_config({key: value})


def test_a_whole_number_is_a_number() -> None:
    instruction = Instruction.from_config({"lr": 1})
    assert instruction.lr == 1.0
    assert isinstance(instruction.lr, float)


def test_keys_of_others_are_left_alone() -> None:
    assert Instruction.from_config({"lr": 0.5, "my-own-key": "anything", "freezer": "full"}) == Instruction(lr=0.5)
