"""Checks at a site, before its SuperNode is started for the first time.

They try what the containers will do: as the service `preflight` of the kit's compose file, with
their user and mounts.
"""

import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from errno import EDQUOT, ENOSPC
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from cryptography import x509

from fedbn_flwr import __version__
from fedbn_flwr.deployment import DeploymentError, host_and_port, read_text
from fedbn_flwr.deployment.flower_internals import is_registered
from fedbn_flwr.deployment.keys import load_node_key, public_text, trusting
from fedbn_flwr.deployment.provision import WRITTEN, read_env

#: seconds that Flower's node authentication lets a node's clock be ahead of the server's, and
#: behind it
AHEAD = 5
BEHIND = 305
#: days that a certificate should last
DAYS = 14
PATIENCE = 10.0
#: bytes for which every folder must have room
NEEDED = 2**20
Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name:<10} {self.text}"


def preflight(kit: Path) -> Iterator[Check]:
    """Yield the checks of a kit; one that cannot be made has failed, and the others go on."""
    env = read_env(kit)
    for name, check in _CHECKS.items():
        try:
            yield from check(kit, env)
        except KeyError as missing:
            yield Check(name, "failed", f"{kit / '.env'} has no {missing}")
        except (OSError, HTTPException, DeploymentError) as error:
            yield Check(name, "failed", " ".join(str(error).split()))
        except Exception as error:  # of whatever kind another server's answer causes
            yield Check(name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _server(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """TLS, whose certificate it is, and what the server lets through."""
    connection = _connect(kit, "FEDBN_SERVER", env["FEDBN_SERVER"])
    assert isinstance(connection.sock, ssl.SSLSocket)
    certificate = connection.sock.getpeercert() or {}
    days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86400
    text = (
        f"{env['FEDBN_SERVER']} by {connection.sock.version()}, certificate valid for "
        f"{days:.0f} days"
    )
    yield Check("tls", "ok" if days > DAYS else "warning", text)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    good = answer.status == 200
    yield Check(
        "server",
        "ok" if good else "failed",
        "the SuperLink answers" if good else f"says {answer.status}",
    )
    yield _clock(answer.headers["Date"])
    connection.request("POST", "/v1/control/list-runs", body=b"")
    closed = connection.getresponse().status == 403
    text = "open to this site: the operator of the server should close it"
    if closed:
        text = "closed to this site (403)"
    yield Check("control", "ok" if closed else "warning", text)


def _connect(kit: Path, name: str, address: str) -> HTTPSConnection:
    host, port = host_and_port(name, address)
    context = trusting(kit / "ca.crt")
    connection = HTTPSConnection(host, port, timeout=PATIENCE, context=context)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        shown = ssl.get_server_certificate((connection.host, connection.port), timeout=PATIENCE)
        end = x509.load_pem_x509_certificate(shown.encode()).not_valid_after_utc
        text = (
            f"the server's certificate is refused: {error.verify_message} (valid until "
            f"{end:%Y-%m-%d})"
        )
        raise DeploymentError(text) from error
    except (socket.gaierror, TimeoutError, ConnectionError) as error:
        raise DeploymentError(f"{address} cannot be reached: {error}") from error
    return connection


def _exchange(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    address = env.get("FEDBN_EXCHANGE", "")
    if not address:
        yield Check(
            "exchange",
            "warning",
            "FEDBN_EXCHANGE is empty in .env: FedTAN and its relatives go by messages",
        )
        return
    connection = _connect(kit, "FEDBN_EXCHANGE", address)
    connection.request("GET", "/")
    connection.getresponse().read()
    yield Check("exchange", "ok", f"{address} is open to this site")


def _registered(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """Whether the server knows this site's key."""
    server = env["FEDBN_SERVER"]
    key = load_node_key(kit / "node.key")
    # what Flower's client would refuse in words of its own
    host_and_port("FEDBN_SERVER", server)
    trusting(kit / "ca.crt")
    if is_registered(server, key, (kit / "ca.crt").read_bytes()):
        yield Check("registered", "ok", "the server knows this site's key")
    else:
        text = f"not yet: give {env['FEDBN_SITE']}.pub to the operator, who registers it"
        yield Check("registered", "warning", text)


def _folders(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    for name in WRITTEN:
        try:
            # in a container it is mounted elsewhere
            if _in_container():
                folder = Path("/srv", name)
            else:
                folder = kit / name
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                if file.write(bytes(NEEDED)) < NEEDED:
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            if error.errno in (ENOSPC, EDQUOT):
                raise DeploymentError(f"the disk of {name} is full: make room") from error
            raise DeploymentError(
                f"{name} cannot be written by user {_user()} ({error.strerror}): `docker compose "
                "run --rm init`, or as root `fedbn-flwr site init`, gives the kit to "
                f"FEDBN_USER={env.get('FEDBN_USER', '10001:10001')}"
            ) from error
    yield Check("folders", "ok", f"{', '.join(WRITTEN)} can be written by user {_user()}")


def _in_container() -> bool:
    """Whether this is the service `preflight`, in which the site's folders are where its services
    have them.
    """
    return bool(os.environ.get("FEDBN_FLWR_DATA"))


def _user() -> str:
    return f"{os.geteuid()}:{os.getegid()}"


def _clock(date: str) -> Check:
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    good = -BEHIND < ahead < AHEAD
    where = "ahead of" if ahead > 0 else "behind"
    text = f"{abs(ahead):.0f} s {where} the server's"
    if good:
        return Check("clock", "ok", text)
    return Check("clock", "failed", f"{text}; at most {AHEAD} ahead, {BEHIND} behind")


def _key(kit: Path, env: Mapping[str, str]) -> Iterator[Check]:
    path = kit / "node.key"
    public = kit / f"{env['FEDBN_SITE']}.pub"
    if not path.exists():
        raise DeploymentError(f"there is none: `fedbn-flwr site init {kit}` makes one")
    key = load_node_key(path)
    if path.stat().st_mode & 0o077:
        raise DeploymentError(f"{path} can be read by others: chmod 600 {path}")
    if public_text(key).split()[1] not in read_text(public):
        raise DeploymentError(f"{public} is not the public half of {path}")
    yield Check(
        "key",
        "ok",
        f"{key.curve.name}, readable by its owner only; {public.name} is its public half",
    )


def _versions(_: Path, env: Mapping[str, str]) -> Iterator[Check]:
    wanted = {}
    for item in filter(None, env.get("FEDBN_VERSIONS", "").split(",")):
        name, _equals, number = item.partition("=")
        wanted[name] = number
    here = {"fedbn-flwr": __version__, "flwr": _version("flwr"), "torch": _version("torch")}
    other = {name: text for name, text in wanted.items() if here.get(name) != text}
    text = ", ".join(f"{name} {number}" for name, number in here.items())
    if other:
        text += "; the federation has " + ", ".join(
            f"{name} {number}" for name, number in other.items()
        )
    yield Check("versions", "failed" if other else "ok", text)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gpu(_: Path, env: Mapping[str, str]) -> Iterator[Check]:
    import torch

    from fedbn_flwr.device import accelerator_name

    wanted = env.get("COMPOSE_PROFILES") == "site-gpu"
    name = accelerator_name()
    if name:
        unused = "; COMPOSE_PROFILES=site-gpu would use it"
        if wanted:
            unused = ""
        text = f"{name}, {torch.accelerator.device_count()} in all{unused}"
        yield Check("gpu", "ok" if wanted else "warning", text)
    else:
        yield Check("gpu", "failed" if wanted else "ok", "none: training uses the CPU")


def _data(_: Path, env: Mapping[str, str]) -> Iterator[Check]:
    named = env.get("FEDBN_DATA", "")
    if not named:
        yield Check(
            "data",
            "warning",
            "FEDBN_DATA is empty in .env: only runs with embedded data are possible",
        )
        return
    folder = Path(named)
    if not folder.is_absolute():
        raise DeploymentError(f"FEDBN_DATA must be an absolute path, got {named!r}")
    if _in_container():
        folder = Path(os.environ["FEDBN_FLWR_DATA"])
    _require_readable(folder)
    if (folder / "train").is_dir():
        homes = [folder]
    else:
        homes = sorted(path.parent for path in folder.glob("*/train"))
    # a reader of the site's own may read anything
    lacking: Verdict = "warning" if env.get("FEDBN_READ") else "failed"
    if not homes:
        names = sorted(path.name for path in folder.iterdir())
        text = (
            f"there is no {folder / 'train'} for train/CLASS/; there is: "
            f"{', '.join(names[:10]) or 'nothing'}"
        )
        yield Check("data", lacking, text)
        return
    # imported here because it takes seconds
    from fedbn_flwr.data.files import test_role

    try:
        tested = test_role(folder, [str(home) for home in homes])
    except ValueError as error:
        yield Check("data", lacking, str(error))
        return
    for home in homes:
        for role in ("train", tested):
            folders = sorted((home / role).glob("*/"))
            counts = {path.name: sum(len(files) for *_, files in os.walk(path)) for path in folders}
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            verdict: Verdict = "ok" if counts and all(counts.values()) else "failed"
            yield Check("data", verdict, f"{home / role}: {text or 'no classes'}")


def _require_readable(folder: Path) -> None:
    """Open every folder and file of the data, as an app will."""

    def refuse(error: OSError) -> None:
        path = Path(error.filename)
        with suppress(OSError):
            status = path.stat()
            owner = f"{status.st_uid}:{status.st_gid}"
            cure = (
                f"FEDBN_USER={owner} in .env, then `docker compose run --rm init`, lets the "
                "containers run as its owner"
            )
            if status.st_uid == 0:  # no container runs as root
                cure = (
                    f"root can let this user read it, by `chown -R {_user()}`, or `setfacl -R "
                    f"-m u:{os.geteuid()}:rX`"
                )
            raise DeploymentError(
                f"{path} cannot be read by user {_user()}, it belongs to {owner}: {cure}"
            ) from error
        raise DeploymentError(f"{folder} is not a folder that can be read") from error

    for place, _, files in os.walk(folder, onerror=refuse):
        for file in files:
            try:
                os.close(os.open(Path(place, file), os.O_RDONLY))
            except OSError as error:
                refuse(error)


_CHECKS: dict[str, Callable[[Path, Mapping[str, str]], Iterator[Check]]] = {
    "tls": _server,
    "exchange": _exchange,
    "key": _key,
    "registered": _registered,
    "versions": _versions,
    "folders": _folders,
    "gpu": _gpu,
    "data": _data,
}
