"""Options of a normalizer, written `key=value,key=value`."""

from collections.abc import Mapping
from typing import Any

import yaml

from fedbn_flwr.experiments.config import UsageError


def parse_norm_options(text: str) -> dict[str, Any]:
    """Read the options; numbers and booleans are what they look like, the rest is text."""
    options = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"norm-options: {item!r} is not of the form key=value")
        try:
            options[key] = _value(value)
        except yaml.YAMLError:
            raise UsageError(f"norm-options: cannot read {item!r}") from None
    return options


def add_norm_options(text: str, added: Mapping[str, Any], owner: str) -> str:
    """Return the options of a text with those that `owner` adds; no option may have two values."""
    given = parse_norm_options(text)
    for key, value in added.items():
        if given.setdefault(key, value) != value:
            raise UsageError(f"norm-options: {key} is {given[key]!r}, but {owner} sets it to {value!r}")
    return ",".join(f"{key}={value}" for key, value in given.items())


def _value(text: str) -> Any:
    for number in (int, float):  # YAML takes 1e-3 for text
        try:
            return number(text)
        except ValueError:
            continue
    return yaml.safe_load(text)
