"""Checks at a site, before its SuperNode is started for the first time."""

import os
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from fedbn_flwr import __version__
from fedbn_flwr.deployment.errors import DeploymentError
from fedbn_flwr.deployment.keys import load_node_key, public_text
from fedbn_flwr.deployment.site import read_env

#: seconds that Flower's node authentication lets a node's clock be ahead of the server's, and behind it
AHEAD, BEHIND = 5, 305
#: bytes that a site should have free, and days that a certificate should last
FREE, DAYS = 10 * 2**30, 14
PATIENCE = 10.0
Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name:<9} {self.text}"


def preflight(kit: Path) -> Iterator[Check]:
    """Yield the checks of a kit; one that cannot be made has failed, and the others go on."""
    env = read_env(kit)
    for name, check in _CHECKS.items():
        try:
            yield from check(kit, env)
        except ssl.SSLCertVerificationError as error:
            yield Check(name, "failed", f"the server's certificate is refused: {error.verify_message}")
        except (OSError, HTTPException, DeploymentError, KeyError) as error:
            yield Check(name, "failed", " ".join(str(error).split()))


def _server(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """TLS, whose certificate it is, and what the server lets through."""
    connection = _connect(kit, env)
    assert isinstance(connection.sock, ssl.SSLSocket)
    certificate = connection.sock.getpeercert() or {}
    days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86400
    text = f"{env['FEDBN_SERVER']} by {connection.sock.version()}, certificate valid for {days:.0f} days"
    yield Check("tls", "ok" if days > DAYS else "warning", text)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    good = answer.status == 200
    yield Check("server", "ok" if good else "failed", "the SuperLink answers" if good else f"says {answer.status}")
    yield _clock(answer.headers["Date"])
    connection.request("POST", "/v1/control/list-runs", body=b"")
    closed = connection.getresponse().status == 403
    text = "closed to this site (403)" if closed else "open to this site: whoever runs the server should close it"
    yield Check("control", "ok" if closed else "warning", text)


def _connect(kit: Path, env: Mapping[str, str]) -> HTTPSConnection:
    host, _, port = env["FEDBN_SERVER"].rpartition(":")
    context = ssl.create_default_context(cafile=kit / "ca.crt")
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=PATIENCE, context=context)
    try:
        connection.connect()
    except (socket.gaierror, TimeoutError, ConnectionError) as error:
        raise DeploymentError(f"{env['FEDBN_SERVER']} cannot be reached: {error}") from error
    return connection


def _clock(date: str) -> Check:
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    good = -BEHIND < ahead < AHEAD
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    return Check(
        "clock", "ok" if good else "failed", text + ("" if good else f"; at most {AHEAD} ahead, {BEHIND} behind")
    )


def _key(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    path, public = kit / "node.key", kit / f"{env['FEDBN_SITE']}.pub"
    if not path.exists():
        raise DeploymentError(f"there is none: `fedbn-flwr site init {kit}` makes one")
    key = load_node_key(path)
    if path.stat().st_mode & 0o077:
        raise DeploymentError(f"{path} can be read by others: chmod 600 {path}")
    if public_text(key).split()[1] not in public.read_text():
        raise DeploymentError(f"{public} is not the public half of {path}")
    yield Check("key", "ok", f"{key.curve.name}, readable by its owner only; {public.name} is its public half")


def _versions(_: Path, env: Mapping[str, str]) -> Iterator[Check]:
    wanted = dict(item.split("=", 1) for item in env.get("FEDBN_VERSIONS", "").split(",") if item)
    here = {"fedbn-flwr": __version__, "flwr": _version("flwr"), "torch": _version("torch")}
    other = {name: text for name, text in wanted.items() if here.get(name) != text}
    text = ", ".join(f"{name} {number}" for name, number in here.items())
    if other:
        text += "; the federation has " + ", ".join(f"{name} {number}" for name, number in other.items())
    yield Check("versions", "failed" if other else "ok", text)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _disk(kit: Path, _: Mapping[str, str]) -> Iterator[Check]:
    free = shutil.disk_usage(kit).free
    text = f"{free / 2**30:.0f} GB free where the kit is"
    yield Check("disk", "ok" if free > FREE else "warning", text + ("" if free > FREE else "; 10 GB are advised"))


def _gpu(_: Path, env: Mapping[str, str]) -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        text = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} in all"
        unused = "" if env.get("COMPOSE_PROFILES") == "site-gpu" else "; COMPOSE_PROFILES=site-gpu would use it"
        yield Check("gpu", "warning" if unused else "ok", text + unused)
    else:
        wanted = env.get("COMPOSE_PROFILES") == "site-gpu"
        yield Check("gpu", "failed" if wanted else "ok", "none: training uses the CPU")


def _data(_: Path, env: Mapping[str, str]) -> Iterator[Check]:
    named = env.get("FEDBN_DATA", "")
    if not named:
        yield Check("data", "warning", "FEDBN_DATA is empty in .env: only runs with embedded data are possible")
        return
    folder = Path(named)
    if not folder.is_absolute():
        raise DeploymentError(f"FEDBN_DATA must be an absolute path, got {named!r}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DeploymentError(f"{folder} is not a folder that can be read")
    homes = [folder] if (folder / "train").is_dir() else sorted(path.parent for path in folder.glob("*/train"))
    if not homes:
        names = sorted(path.name for path in folder.iterdir())
        yield Check("data", "warning", f"no folder of images a class in {folder}; it has: {', '.join(names[:10])}")
    for home in homes:
        for role in ("train", "test"):
            counts = {path.name: _count(path) for path in sorted((home / role).glob("*/"))}
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            verdict: Verdict = "ok" if counts and all(counts.values()) else "failed"
            yield Check("data", verdict, f"{home / role}: {text or 'no classes'}")


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


_CHECKS: dict[str, Callable[[Path, Mapping[str, str]], Iterator[Check]]] = {
    "tls": _server,
    "key": _key,
    "versions": _versions,
    "disk": _disk,
    "gpu": _gpu,
    "data": _data,
}
