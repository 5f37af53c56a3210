"""Making a federation's folders: one for its server, one for its operator, its CA, and a kit for each site.

```
ca/        ca.key                                the CA's private key: needed to renew, best kept offline
server/    .env docker-compose.yml ca.crt server.crt server.key superexec.secret state/ results/
           nginx.conf operator.conf              the doors for sites and for the operator
operator/  config.toml operator.key ca.crt       Flower's own configuration (FLWR_HOME), and who is registered
.env       for all of it on one machine
sites/S/   .env docker-compose.yml ca.crt *.service state/ models/ log/      the kit of site S
```

A folder that exists is completed: new sites get their kits, and no file is overwritten.
"""

import os
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
    make_ca,
    make_secret,
    make_server_certificate,
    write_new,
)
from fedbn_flwr.deployment.operator import Operator

_TEMPLATES = Path(__file__).parent / "templates"
#: the names of the server's services in docker-compose.yml, and the machine itself
_INNER_HOSTS = ("superlink", "proxy", "localhost", "127.0.0.1")
_SITES_DOOR = (
    "The proxy between the sites and the SuperLink: sites reach Flower's Fleet API and the health check, and by\n"
    "# another port the ServerApp's side channel, nothing else."
)
_OPERATORS_DOOR = "The operator's door: the Control API and the results, for those who hold the operator's key."
#: for containers of folders that root has made: services never run as root
_UNPRIVILEGED = 10001


def provision(federation: Federation, out: Path) -> list[Path]:
    """Make what is missing of a federation's folders in `out`; returns the new files."""
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
    for number, site in enumerate(federation.sites):
        _provision_site(federation, out, site, number)
    return sorted(path for path in out.rglob("*") if path.is_file() and path not in before)


def user_of(folder: Path) -> str:
    """Return USER:GROUP for containers that use a folder: its owner, or an unprivileged user if that is root."""
    status = folder.stat()
    return f"{status.st_uid or _UNPRIVILEGED}:{status.st_gid or _UNPRIVILEGED}"


def hand_over(folder: Path, user: str = "") -> None:
    """Give a file, or a folder with all in it, to the user USER:GROUP of the containers; only root can and needs to."""
    if os.geteuid() == 0:
        number, group = map(int, (user or f"{_UNPRIVILEGED}:{_UNPRIVILEGED}").split(":"))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, number, group, follow_symlinks=False)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return a template with each `@NAME@` replaced."""
    text = (_TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def _make_folders(federation: Federation, out: Path) -> None:
    inner = [f"sites/{site}{part}" for site in federation.sites for part in ("", "/state", "/models", "/log")]
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
    _missing_text(server / ".env", fill("server.env", values))
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


def _provision_site(federation: Federation, out: Path, site: str, number: int) -> None:
    kit = out / "sites" / site
    values = {
        "FEDERATION": federation.name,
        "SITE": site,
        "SERVER": federation.address,
        "PORT": federation.port,
        "EXCHANGE": federation.exchange_address,
        "PARTITION": number,
        "SITES": len(federation.sites),
        "VERSIONS": f"fedbn-flwr={__version__},flwr={version('flwr')}",
    }
    _missing_text(kit / ".env", fill("site.env", values))
    _missing_text(kit / "ca.crt", (out / "ca" / "ca.crt").read_text())
    _missing_text(kit / "docker-compose.yml", compose_file().read_text())
    for unit in ("fedbn-node.service", "fedbn-exec.service"):
        _missing_text(kit / unit, fill(unit, values))
    hand_over(kit)


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
