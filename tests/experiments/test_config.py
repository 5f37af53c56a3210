"""The shared options: their defaults, and what they refuse."""

from dataclasses import fields
from typing import Any

import pytest

from fedbn_flwr.experiments import Config, UsageError
from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.plugins.options import convert, options_of
from fedbn_flwr.strategies import REGISTRY
from fedbn_flwr.wire import wire_key


def test_every_option_has_a_kebab_name_and_a_help_text() -> None:
    assert list(options_of(Config)) == [wire_key(item.name) for item in fields(Config)] == list(Config().to_mapping())
    of_strategies = [option for strategy in REGISTRY.values() for option in own_options(strategy).values()]
    assert all(option.help for option in [*options_of(Config).values(), *of_strategies])


#: value, kind, what an option of the kind takes it for
TAKEN: list[tuple[Any, Any, Any]] = [
    ("5", int, 5),
    (5.0, int, 5),
    ("5", float, 5.0),
    ("1e-3", float, 0.001),
    (5, float, 5.0),
    ("true", bool, True),
    ("False", bool, False),
    (True, bool, True),
    ("text", str, "text"),
    (5, str, "5"),
    ("0.5", float | None, 0.5),
    ("5", int | str, 5),
    ("five", int | str, "five"),
]


@pytest.mark.parametrize(("value", "kind", "wanted"), TAKEN)
def test_text_and_numbers_become_what_an_option_takes(value: Any, kind: Any, wanted: Any) -> None:
    found = convert("some-option", value, kind)
    assert found == wanted
    assert type(found) is type(wanted)


#: what is said to be needed, kind, values that it does not take
REFUSED: list[tuple[str, Any, list[Any]]] = [
    ("a whole number", int, ["five", "5.5", 5.5, float("inf"), "", True]),
    ("a number", float, ["fast", "nan", "inf", False]),
    ("true or false", bool, ["yes", 1]),
    ("a number", float | None, ["fast"]),
    ("a whole number or a number", int | float, ["fast"]),
]


@pytest.mark.parametrize(("spoken", "kind", "values"), REFUSED)
def test_what_an_option_cannot_take_is_named(spoken: str, kind: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError) as caught:
            convert("some-option", value, kind)
        assert str(caught.value) == f"some-option must be {spoken}, got {value!r}"
