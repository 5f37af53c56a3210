"""Making a federation's folders: one for its server, one for its operator, its CA, and a kit for each site.

```
ca/        ca.key                                the CA's private key: needed to renew, best kept offline
server/    .env docker-compose.yml ca.crt server.crt server.key superexec.secret state/ results/
           nginx.conf operator.conf              the doors for sites and for the operator
operator/  config.toml operator.key ca.crt       Flower's own configuration (FLWR_HOME), and who is registered
.env       for all of it on one machine
sites/S/   .env docker-compose.yml ca.crt *.service state/ models/ log/ code/      the kit of site S
numbers.json                                     the sites' numbers, also of sites that were removed
```

A folder that exists is completed: new sites get their kits, and no file is overwritten but `numbers.json`.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from fedbn_flwr import __version__
from fedbn_flwr.deployment import DeploymentError
from fedbn_flwr.deployment.federation import Federation
from fedbn_flwr.deployment.keys import (
    PRIVATE,
    PUBLIC,
    certificate_hosts,
    hand_over,
    make_ca,
    make_secret,
    make_server_certificate,
    user_of,
    write_new,
)
from fedbn_flwr.deployment.operator import Operator
from fedbn_flwr.deployment.site import WRITTEN

_TEMPLATES = Path(__file__).parent / "templates"
#: the names of the server's services in docker-compose.yml, and the machine itself
_INNER_HOSTS = ("superlink", "proxy", "localhost", "127.0.0.1")
#: lines of `.env` that are not the federation's
_OWN = ("FEDBN_DATA", "FEDBN_USER", "COMPOSE_PROFILES")
_SITES_DOOR = (
    "The proxy between the sites and the SuperLink: sites reach Flower's Fleet API and the health check, and by\n"
    "# another port the ServerApp's side channel, nothing else."
)
_OPERATORS_DOOR = "The operator's door: the Control API and the results, for those who hold the operator's key."


def provision(federation: Federation, out: Path) -> list[str]:
    """Make what is missing of a federation's folders in `out`; return lines about new files and old kits."""
    before = {path for path in out.rglob("*") if path.is_file()} if out.exists() else set()
    _make_folders(federation, out)
    certificate, in_use = out / "ca" / "ca.crt", out / "server" / "ca.crt"
    if in_use.exists():
        # the CA may be offline by now: a new one would sign nothing that the server shows
        _missing_text(certificate, in_use.read_text())
    if not certificate.exists():
        make_ca(federation.name, certificate, out / "ca" / "ca.key")
    _provision_operator(federation, out)
    _provision_server(federation, out)
    numbers = _numbers(federation, out)
    old = [line for site in federation.sites for line in _provision_site(federation, out, site, numbers)]
    return [f"wrote {path}" for path in sorted(out.rglob("*")) if path.is_file() and path not in before] + old


def _numbers(federation: Federation, out: Path) -> dict[str, int]:
    """Return the sites' numbers. A site keeps its number, which is nobody else's, even when the site is removed."""
    path = out / "numbers.json"
    numbers: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    for site in federation.sites:
        numbers.setdefault(site, max(numbers.values(), default=-1) + 1)
    path.write_text(json.dumps(numbers, indent=2) + "\n")
    return numbers


def _other_lines(env: Path, text: str) -> list[str]:
    """Return the federation's lines of a text that `.env` does not have, if it is there."""
    have = env.read_text().splitlines() if env.exists() else text.splitlines()
    return [line for line in text.splitlines() if line not in have and not line.startswith(("#", *_OWN))]


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return a template with each `@NAME@` replaced."""
    text = (_TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def _make_folders(federation: Federation, out: Path) -> None:
    inner = [f"sites/{site}/{part}" for site in federation.sites for part in ("", "code", *WRITTEN)]
    try:
        for name in ("", "ca", "operator", "server", "server/state", "server/results", "sites", *inner):
            (out / name).mkdir(mode=0o755 if name in ("", "sites") else 0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DeploymentError(f"{error.filename} cannot be made: {error.strerror}") from error


def _provision_server(federation: Federation, out: Path) -> None:
    server = out / "server"
    hand_over(server)
    if not (server / "server.crt").exists():
        _make_certificate(federation, out)
    elif missing := set(_hosts(federation)) - certificate_hosts(server / "server.crt"):
        raise DeploymentError(
            f"the server's certificate is not for {', '.join(sorted(missing))}: delete server.crt and server.key in "
            f"{server}, and run this again"
        )
    values = {
        "FEDERATION": federation.name,
        "PORT": federation.port,
        "OPERATOR_PORT": federation.operator_port,
        "EXCHANGE_PORT": federation.exchange_port,
        "EXCHANGE": federation.exchange_address,
        "USER": user_of(server),
        "OUT": out.resolve(),
        "KEY": (out / "operator" / "operator.key").read_text().strip(),
    }
    if other := _other_lines(server / ".env", settings := fill("server.env", values)):
        made = ("server/.env", "server/nginx.conf", "server/operator.conf", ".env", "operator/config.toml")
        raise DeploymentError(
            f"the server lacks {' '.join(other)}: delete {', '.join(made)} in {out}, and run this again"
        )
    _missing_text(out / ".env", fill("all.env", values))
    _missing(server / "superexec.secret", make_secret)
    _missing_text(server / "ca.crt", (out / "ca" / "ca.crt").read_text())
    for name, purpose, part in (
        ("nginx.conf", _SITES_DOOR, "nginx-sites.conf"),
        ("operator.conf", _OPERATORS_DOOR, "nginx-operator.conf"),
    ):
        text = fill("nginx.conf", {"PURPOSE": purpose, "SERVERS": fill(part, values), **values})
        # the operator's key stands in the second one
        _missing(server / name, lambda new, text=text: write_new(new, text, PRIVATE))  # type: ignore[misc]
    _missing_text(server / ".env", settings)
    _missing_text(server / "docker-compose.yml", compose_file().read_text())
    hand_over(server)


def _provision_operator(federation: Federation, out: Path) -> None:
    operator = (out / "operator").resolve()
    _missing_text(operator / "ca.crt", (out / "ca" / "ca.crt").read_text())
    _missing(operator / "operator.key", lambda new: write_new(new, secrets.token_hex(32) + "\n", PRIVATE))
    address = f"127.0.0.1:{federation.operator_port}"
    lines = [
        "[superlink]",
        f'default = "{federation.name}"',
        "",
        f"[superlink.{federation.name}]",
        f'address = "{address}"',
        f'root-certificates = "{operator / "ca.crt"}"',
    ]
    _missing_text(operator / "config.toml", "\n".join(lines) + "\n")
    # for Flower's own command
    Operator(operator)


def _provision_site(federation: Federation, out: Path, site: str, numbers: Mapping[str, int]) -> list[str]:
    kit = out / "sites" / site
    values = {
        "FEDERATION": federation.name,
        "SITE": site,
        "SERVER": federation.address,
        "PORT": federation.port,
        "EXCHANGE": federation.exchange_address,
        "PARTITION": numbers[site],
        "SITES": max(numbers.values()) + 1,
        "VERSIONS": f"fedbn-flwr={__version__},flwr={version('flwr')}",
    }
    other = _other_lines(kit / ".env", text := fill("site.env", values))
    _missing_text(kit / ".env", text)
    _missing_text(kit / "ca.crt", (out / "ca" / "ca.crt").read_text())
    _missing_text(kit / "docker-compose.yml", compose_file().read_text())
    for unit in ("fedbn-node.service", "fedbn-exec.service"):
        _missing_text(kit / unit, fill(unit, values))
    hand_over(kit)
    return [f"the kit of {site} is out of date; its .env, here and at the site, needs {' '.join(other)}"] * bool(other)


def _make_certificate(federation: Federation, out: Path) -> None:
    server, key = out / "server", out / "ca" / "ca.key"
    if not key.exists():
        raise DeploymentError(f"{key} is not there: put the CA's key back to make a certificate")
    make_server_certificate(out / "ca" / "ca.crt", key, _hosts(federation), federation.days, server)
    hand_over(server)


def _hosts(federation: Federation) -> list[str]:
    return [federation.server, *federation.also, *_INNER_HOSTS]


def compose_file() -> Path:
    """Return docker-compose.yml: beside this module in a wheel, at the root of a checkout."""
    here = Path(__file__).parent
    places = [here / "docker-compose.yml", here.parents[1] / "docker-compose.yml"]
    return next((path for path in places if path.exists()), places[0])


def _missing(path: Path, make: Callable[[Path], None]) -> None:
    if not path.exists():
        make(path)


def _missing_text(path: Path, text: str) -> None:
    _missing(path, lambda new: write_new(new, text, PUBLIC))
