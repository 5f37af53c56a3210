"""The one file that describes a federation: its server and its sites."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from fedbn_flwr.deployment import DeploymentError, read_text
from fedbn_flwr.plugins.options import option_key
from fedbn_flwr.plugins.yaml_text import load_yaml

#: names of sites become file names, host names and names of Compose projects
_SITE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
#: parts of machines' names may have upper-case letters
_PART = re.compile(_SITE.pattern, re.IGNORECASE | re.ASCII)
#: days of a certificate, at most: a hundred years
LONGEST = 36_500


def check_name(what: str, name: str) -> None:
    """Refuse a name that cannot be a site's or a federation's."""
    if not _SITE.fullmatch(name):
        raise DeploymentError(
            f"{what} {name!r} must be lower-case letters, digits and hyphens, at most 63"
        )


@dataclass(frozen=True)
class Federation:
    """A server and its sites, whose numbers `provision` keeps."""

    #: name of the federation in the operator's configuration
    name: str
    #: the name or address by which sites reach the server
    server: str
    sites: tuple[str, ...]
    #: further names and addresses of the server
    also: tuple[str, ...] = ()
    #: the port that is open to the sites
    port: int = 8443
    #: the port for the operator, which listens on the server's loopback only
    operator_port: int = 8444
    #: the port that is open to the sites for exchanges of layer-wise steps
    exchange_port: int = 8445
    #: days for which a server certificate is valid
    days: int = 365

    def __post_init__(self) -> None:
        """Refuse what cannot be a federation."""
        check_name("name", self.name)
        for host in (self.server, *self.also):
            if not (_is_address(host) or all(map(_PART.fullmatch, host.split(".")))):
                raise DeploymentError(f"{host!r} is neither a host name nor an address")
        for site in self.sites:
            check_name("site", site)
        twice = [site for site in self.sites if self.sites.count(site) > 1]
        if twice:
            raise DeploymentError(f"site {twice[0]!r} is listed twice")
        if not self.sites:
            raise DeploymentError("sites must list at least one site")
        ports = {
            "port": self.port,
            "operator-port": self.operator_port,
            "exchange-port": self.exchange_port,
        }
        for key, number in ports.items():
            if not 1024 <= number <= 65535:
                raise DeploymentError(f"{key} must be between 1024 and 65535, got {number}")
        for one, other in combinations(ports, 2):
            if ports[one] == ports[other]:
                raise DeploymentError(f"{one} and {other} must differ, both are {ports[one]}")
        if not 1 <= self.days <= LONGEST:
            raise DeploymentError(f"days must be between 1 and {LONGEST}, got {self.days}")

    @property
    def address(self) -> str:
        """The server as a site's SuperNode names it."""
        return f"{self._host}:{self.port}"

    @property
    def exchange_address(self) -> str:
        """The server's side channel as a site names it."""
        return f"{self._host}:{self.exchange_port}"

    @property
    def _host(self) -> str:
        if ":" in self.server:
            return f"[{self.server}]"
        return self.server

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a YAML file whose keys are the fields' names with hyphens."""
        text = read_text(path)
        try:
            content = load_yaml(text)
        except ValueError as error:
            raise DeploymentError(f"{path} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise DeploymentError(f"{path} must hold keys and values")
        return cls.from_mapping(content)

    @classmethod
    def from_mapping(cls, content: Mapping[Any, Any]) -> Self:
        """Check keys and types."""
        known = {option_key(item.name): item for item in fields(cls)}
        unknown = [key for key in content if key not in known]
        if unknown:
            raise DeploymentError(f"unknown key {unknown[0]!r}; known: {', '.join(known)}")
        missing = [
            key for key, item in known.items() if item.default is MISSING and key not in content
        ]
        if missing:
            raise DeploymentError(f"key {missing[0]!r} is missing")
        return cls(
            **{
                known[key].name: _typed(key, value, known[key].type)
                for key, value in content.items()
            }
        )


def _typed(key: str, value: Any, kind: Any) -> Any:
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if (
        kind == tuple[str, ...]
        and isinstance(value, list)
        and all(isinstance(item, str) for item in value)
    ):
        return tuple(value)
    wanted = {int: "a whole number", str: "text"}.get(kind, "a list of texts")
    raise DeploymentError(f"{key} must be {wanted}, got {value!r}")


def _is_address(host: str) -> bool:
    """Return whether a host is named by its IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
