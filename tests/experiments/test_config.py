"""The shared options: their defaults, and what they refuse."""

from dataclasses import fields
from typing import Any, Optional

import pytest

from fedbn_flwr.experiments import Config, UsageError
from fedbn_flwr.plugins.options import convert, options_of
from fedbn_flwr.wire import wire_key


def test_every_option_has_a_kebab_name_and_a_help_text() -> None:
    assert list(options_of(Config)) == [wire_key(item.name) for item in fields(Config)] == list(Config().to_mapping())
    assert all(option.help for option in options_of(Config).values())


def test_a_config_survives_as_a_mapping_and_as_text() -> None:
    config = Config(lr=0.25, replacement=True, image_size=12, partition="dirichlet:0.1")
    assert Config.from_mapping(config.to_mapping()) == config
    assert Config.from_mapping({key: str(value) for key, value in config.to_mapping().items()}) == config


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
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
        ("0.5", Optional[float], 0.5),  # noqa: UP045
        ("5", int | str, 5),
        ("five", int | str, "five"),
    ],
)
def test_text_and_numbers_become_what_an_option_takes(value: Any, kind: Any, wanted: Any) -> None:
    found = convert("some-option", value, kind)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "kind", "spoken"),
    [
        ("five", int, "a whole number"),
        ("5.5", int, "a whole number"),
        (5.5, int, "a whole number"),
        (float("inf"), int, "a whole number"),
        ("", int, "a whole number"),
        (True, int, "a whole number"),
        ("fast", float, "a number"),
        ("nan", float, "a number"),
        ("inf", float, "a number"),
        (False, float, "a number"),
        ("yes", bool, "true or false"),
        (1, bool, "true or false"),
        ("fast", float | None, "a number"),
        ("fast", int | float, "a whole number or a number"),
    ],
)
def test_what_an_option_cannot_take_is_named(value: Any, kind: Any, spoken: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert("some-option", value, kind)
    assert str(caught.value) == f"some-option must be {spoken}, got {value!r}"
