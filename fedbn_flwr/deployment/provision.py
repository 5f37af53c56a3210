"""Making a federation's folders: one for its server, one for its operator, its CA, and a kit for
each site.

A site itself completes its kit with its keys and secret.

```
ca/        ca.key: the CA's private key, needed to renew and best kept offline
server/    .env docker-compose.yml ca.crt server.crt server.key superexec.secret
           state/ results/ code/ weights/
           nginx.conf operator.conf: the doors for sites and for the operator
operator/  config.toml operator.key ca.crt: Flower's own configuration (FLWR_HOME),
           and who is registered
.env       for all of it on one machine
sites/S/   the kit of site S: .env docker-compose.yml ca.crt *.service
           state/ models/ log/ code/ weights/
numbers.json    the sites' numbers, also of sites that were removed
```

A folder that exists is completed: new sites get their kits, and no file is overwritten but
`numbers.json`.
"""

import json
import os
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from fedbn_flwr import __version__
from fedbn_flwr.deployment import DeploymentError, read_text, using
from fedbn_flwr.deployment.federation import Federation
from fedbn_flwr.deployment.keys import (
    PRIVATE,
    PUBLIC,
    certificate_hosts,
    hand_over,
    make_ca,
    make_node_key,
    make_server_certificate,
    user_of,
    write_new,
)
from fedbn_flwr.deployment.operator import Operator
from fedbn_flwr.whole_files import write_bytes

_TEMPLATES = Path(__file__).parent / "templates"
#: the names of the server's services in docker-compose.yml, and the machine itself
_INNER_HOSTS = ("superlink", "proxy", "localhost", "127.0.0.1")
#: folders of a kit that the containers write to, and those that they read, which the server has,
#: too
WRITTEN = ("log", "state", "models")
READ = ("code", "weights")
#: lines of `.env` that are not the federation's
_OWN = ("FEDBN_DATA", "FEDBN_USER", "COMPOSE_PROFILES")


def provision(federation: Federation, out: Path) -> list[str]:
    """Make what is missing of a federation's folders in `out`.

    Return lines about new files and old kits.
    """
    if out.exists():
        before = {path for path in out.rglob("*") if path.is_file()}
    else:
        before = set()
    _make_folders(federation, out)
    certificate = out / "ca" / "ca.crt"
    in_use = out / "server" / "ca.crt"
    if in_use.exists():
        # the CA may be offline by now: a new one would sign nothing that the server shows
        _write_missing(certificate, read_text(in_use))
    if not certificate.exists():
        make_ca(federation.name, certificate, out / "ca" / "ca.key")
    _provision_operator(federation, out)
    _provision_server(federation, out)
    numbers = _numbers(federation, out)
    old = [
        line
        for site in federation.sites
        for line in _provision_site(federation, out, site, numbers)
    ]
    return [
        f"wrote {path}" for path in sorted(out.rglob("*")) if path.is_file() and path not in before
    ] + old


def _numbers(federation: Federation, out: Path) -> dict[str, int]:
    """Return the sites' numbers.

    A site keeps its number, which is nobody else's, even when the site is removed.
    """
    path = out / "numbers.json"
    numbers = dict[str, int]()
    if path.exists():
        with using(path):
            numbers |= {site: int(number) for site, number in json.loads(path.read_text()).items()}
    for site in federation.sites:
        numbers.setdefault(site, max(numbers.values(), default=-1) + 1)
    write_bytes(path, (json.dumps(numbers, indent=2) + "\n").encode(), durable=True)
    return numbers


def _other_lines(env: Path, text: str) -> list[str]:
    """Return the federation's lines of a text that `.env` does not have, if it is there."""
    if env.exists():
        have = read_text(env).splitlines()
    else:
        have = text.splitlines()
    return [
        line for line in text.splitlines() if line not in have and not line.startswith(("#", *_OWN))
    ]


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return a template with each `@NAME@` replaced."""
    text = (_TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def _make_folders(federation: Federation, out: Path) -> None:
    inner = [f"sites/{site}/{part}" for site in federation.sites for part in ("", *READ, *WRITTEN)]
    inner += [f"server/{part}" for part in READ]
    try:
        for name in (
            "",
            "ca",
            "operator",
            "server",
            "server/state",
            "server/results",
            "sites",
            *inner,
        ):
            (out / name).mkdir(
                mode=0o755 if name in ("", "sites") else 0o700, parents=True, exist_ok=True
            )
    except OSError as error:
        raise DeploymentError(f"{error.filename} cannot be made: {error.strerror}") from error


def _provision_server(federation: Federation, out: Path) -> None:
    server = out / "server"
    hand_over(server)
    if not (server / "server.crt").exists():
        _make_certificate(federation, out)
    elif missing := set(_hosts(federation)) - certificate_hosts(server / "server.crt"):
        raise DeploymentError(
            f"the server's certificate is not for {', '.join(sorted(missing))}: delete server.crt "
            f"and server.key in {server}, and run this again"
        )
    values = {
        "FEDERATION": federation.name,
        "PORT": federation.port,
        "OPERATOR_PORT": federation.operator_port,
        "EXCHANGE_PORT": federation.exchange_port,
        "EXCHANGE": federation.exchange_address,
        "USER": user_of(server),
        "OUT": out.resolve(),
        "KEY": read_text(out / "operator" / "operator.key").strip(),
    }
    other = _other_lines(server / ".env", settings := fill("server.env", values))
    if other:
        made = (
            "server/.env",
            "server/nginx.conf",
            "server/operator.conf",
            ".env",
            "operator/config.toml",
        )
        raise DeploymentError(
            f"the server lacks {' '.join(other)}: delete {', '.join(made)} in {out}, and run this "
            "again"
        )
    _write_missing(out / ".env", fill("all.env", values))
    _write_missing(server / "superexec.secret", secrets.token_bytes(32), PRIVATE)
    _write_missing(server / "ca.crt", read_text(out / "ca" / "ca.crt"))
    for name, part in (
        ("nginx.conf", "nginx-sites.conf"),
        ("operator.conf", "nginx-operator.conf"),
    ):
        door = {"SERVERS": fill(part, values), **values}
        # the operator's key stands in the second one
        _write_missing(server / name, fill("nginx.conf", door), PRIVATE)
    _write_missing(server / ".env", settings)
    _write_missing(server / "docker-compose.yml", compose_file().read_text())
    hand_over(server)


def _provision_operator(federation: Federation, out: Path) -> None:
    operator = (out / "operator").resolve()
    _write_missing(operator / "ca.crt", read_text(out / "ca" / "ca.crt"))
    _write_missing(operator / "operator.key", secrets.token_hex(32) + "\n", PRIVATE)
    values = {
        "FEDERATION": federation.name,
        "OPERATOR_PORT": federation.operator_port,
        "HOME": operator,
    }
    _write_missing(operator / "config.toml", fill("config.toml", values))
    # for Flower's own command
    Operator(operator)


def _provision_site(
    federation: Federation, out: Path, site: str, numbers: Mapping[str, int]
) -> list[str]:
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
    _write_missing(kit / ".env", text)
    _write_missing(kit / "ca.crt", read_text(out / "ca" / "ca.crt"))
    _write_missing(kit / "docker-compose.yml", compose_file().read_text())
    for unit in ("fedbn-node.service", "fedbn-exec.service"):
        _write_missing(kit / unit, fill(unit, values))
    hand_over(kit)
    if not other:
        return []
    return [
        f"the kit of {site} is out of date; its .env, here and at the site, needs {' '.join(other)}"
    ]


def read_env(kit: Path) -> dict[str, str]:
    """Read the kit's `.env`."""
    text = read_text(kit / ".env", f": is {kit} the kit of a site?")
    lines = [line.strip() for line in text.splitlines()]
    return dict(line.split("=", 1) for line in lines if not line.startswith("#") and "=" in line)


def init_site(kit: Path) -> Path:
    """Make the site's private key and secret, which stay here, and give what they need to the user
    of the containers.

    A key that is there stays. Returns the public half, which the operator needs.
    """
    env = read_env(kit)
    if "FEDBN_SITE" not in env:
        raise DeploymentError(f"{kit / '.env'} has no line FEDBN_SITE=...")
    site = env["FEDBN_SITE"]
    # Compose has read `.env` already when it runs this as the service `init`, and says which user
    # it found
    user = os.environ.get("FEDBN_USER") or env.get("FEDBN_USER") or user_of(kit)
    if "FEDBN_USER" not in env:
        with (kit / ".env").open("a") as file:
            file.write(
                f"\n# who the containers run as; must be able to read the data\nFEDBN_USER={user}\n"
            )
    public = kit / f"{site}.pub"
    if not (kit / "node.key").exists():
        public.unlink(missing_ok=True)  # the key that it belonged to is lost
        make_node_key(kit / "node.key", public, site)
    _write_missing(kit / "superexec.secret", secrets.token_bytes(32), PRIVATE)
    for folder in (*WRITTEN, *READ):
        (kit / folder).mkdir(mode=0o700, exist_ok=True)
    for name in ("node.key", "superexec.secret", *READ, *WRITTEN):
        hand_over(kit / name, user)
    return public


def _make_certificate(federation: Federation, out: Path) -> None:
    server = out / "server"
    key = out / "ca" / "ca.key"
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


def _write_missing(path: Path, content: str | bytes, mode: int = PUBLIC) -> None:
    if not path.exists():
        write_new(path, content, mode)
