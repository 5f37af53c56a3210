"""docker-compose.yml as Compose reads it: what each service of a profile runs, with which files and
networks.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.checkout import ROOT

COMPOSE = ROOT / "docker-compose.yml"
#: without another one inside
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+])([^{}]*))?\}")


@dataclass(frozen=True)
class Volume:
    """A folder or file of the machine, and where a container has it."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class Service:
    """A service with every default filled in."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    volumes: tuple[Volume, ...]
    networks: tuple[str, ...]
    ports: tuple[str, ...]
    user: str
    raw: Mapping[str, Any]


def read_compose(
    profile: str, variables: Mapping[str, str], path: Path = COMPOSE
) -> dict[str, Service]:
    """Return the services of a profile."""
    content = yaml.safe_load(interpolate(path.read_text(), variables))
    return {
        name: _service(name, raw)
        for name, raw in content["services"].items()
        if profile in raw.get("profiles", [profile])
    }


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Replace `${NAME}`, `${NAME:-default}` and `${NAME:+replacement}`, the innermost first.

    An empty variable has the default, and no replacement.
    """

    def value(match: re.Match[str]) -> str:
        given, other = variables.get(match[1], ""), match[3] or ""
        return (other if given else "") if match[2] == "+" else given or other

    while (replaced := _VARIABLE.sub(value, text)) != text:
        text = replaced
    return text


def _service(name: str, raw: Mapping[str, Any]) -> Service:
    volumes = [text.split(":") for text in raw.get("volumes", ())]
    return Service(
        name,
        tuple(str(word) for word in (*raw.get("entrypoint", ()), *raw.get("command", ()))),
        # compose puts values into what it has parsed, so that an empty one is an empty text
        {
            key: "" if value is None else str(value)
            for key, value in raw.get("environment", {}).items()
        },
        tuple(Volume(source, target, mode == ["ro"]) for source, target, *mode in volumes),
        tuple(raw.get("networks", ())),
        tuple(raw.get("ports", ())),
        str(raw["user"]),
        raw,
    )


def image_environment() -> dict[str, str]:
    """Return the variables that the Dockerfile sets."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return dict(
        word.split("=", 1)
        for line in re.findall("(?m)^ENV (.*)$", text)
        for word in shlex.split(line)
    )
