"""Containers without Docker: each service in namespaces of its own for network, mounts and processes, as root.

A network of the compose file is a bridge. A service has an interface on each of its networks, and knows the names of
the services that it shares a network with: from its hosts file and, as in Docker, from a name server on 127.0.0.11.
Files are mounted where the compose file says. Services run as the compose file's user, without capabilities.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from tests.helpers.checkout import BIN, ROOT, environment
from tests.helpers.compose import Service, image_environment
from tests.helpers.relay import Relay
from tests.helpers.supervisor import Supervised
from tests.helpers.waiting import PATIENCE

_PROGRAMS = ("ip", "unshare", "setpriv", "mount", "nginx", "curl")
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@cache
def why_not() -> str:
    """Return why containers cannot be imitated here; nothing if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in _PROGRAMS if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}"
    name = f"fbt{os.getpid()}"
    steps = (
        ("ip", "netns", "add", name),
        ("ip", "link", "add", name, "type", "bridge"),
        ("ip", "netns", "exec", name, *_UNSHARE, "mount", "-t", "tmpfs", "none", "/srv"),
    )
    tried = [subprocess.run(step, capture_output=True, text=True, check=False) for step in steps]
    for kind in ("netns", "link"):
        subprocess.run(("ip", kind, "del", name), capture_output=True, check=False)
    return next((f"no namespaces here: {done.stderr.strip()}" for done in tried if done.returncode), "")


class Containers:
    """The services of a compose file, which run while the context is open."""

    def __init__(self, services: Mapping[str, Service], project: Path, logs: Path) -> None:
        self.services, self.project, self.logs = services, project, logs
        #: a prefix that no other test run of this machine has, short enough for the name of an interface
        self._mark = f"fb{os.getpid() % 100000:x}"
        self._networks = sorted({network for service in services.values() for network in service.networks})
        self.running: dict[str, Supervised] = {}
        self._name_servers: list[Supervised] = []
        self._relays: list[Relay] = []

    def __enter__(self) -> Self:
        """Make networks and namespaces, and start every service."""
        try:
            for number, _ in enumerate(self._networks):
                _ip("link", "add", f"{self._mark}b{number}", "type", "bridge")
                _ip("addr", "add", f"{self._subnet(number)}.1/24", "dev", f"{self._mark}b{number}")
                _ip("link", "set", f"{self._mark}b{number}", "up")
            for number, service in enumerate(self.services.values()):
                self._connect(number, service)
            for service in self.services.values():
                self._start(service)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every process, and remove networks and namespaces."""
        for relay in self._relays:
            relay.close()
        for process in (*self.running.values(), *self._name_servers):
            process.stop()
        for service in self.services:
            with suppress(AssertionError):
                _ip("netns", "del", self._namespace(service))
            shutil.rmtree(_names_folder(self._namespace(service)), ignore_errors=True)
        for number, _network in enumerate(self._networks):
            with suppress(AssertionError):
                _ip("link", "del", f"{self._mark}b{number}")
        with suppress(OSError):
            _names_folder("").rmdir()

    def run(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a service: with its network, files, user and environment."""
        words = self._inside(self.services[service], command)
        return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=PATIENCE)

    def shut(self, service: str, network: str, *ports: int) -> None:
        """Drop everything that leaves a service towards a network, but what goes to these TCP ports of it.

        Nothing comes in from there, either: what would answer is dropped.
        """
        rules = (
            "-n",
            self._namespace(service),
            "rule",
            "add",
            "to",
            f"{self._subnet(self._networks.index(network))}.0/24",
        )
        for port in ports:
            _ip(*rules, "pref", "100", "ipproto", "tcp", "dport", str(port), "lookup", "main")
        _ip(*rules, "pref", "200", "blackhole")

    def _namespace(self, service: str) -> str:
        return f"{self._mark}-{service}"

    def _subnet(self, network: int) -> str:
        # of the range for tests of networks (RFC 2544), which no machine is reached by
        return f"198.18.{os.getpid() % 32 * 8 + network}"

    def _address(self, service: str, network: str) -> str:
        return f"{self._subnet(self._networks.index(network))}.{list(self.services).index(service) + 2}"

    def _connect(self, number: int, service: Service) -> None:
        """Make the network namespace of a service, its interfaces and its names."""
        namespace = self._namespace(service.name)
        self._write_names(service)
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        for place, network in enumerate(service.networks):
            outer, inner = f"{self._mark}v{number}x{place}", f"eth{place}"
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
            _ip("link", "set", outer, "master", f"{self._mark}b{self._networks.index(network)}", "up")
            _ip("-n", namespace, "addr", "add", f"{self._address(service.name, network)}/24", "dev", inner)
            _ip("-n", namespace, "link", "set", inner, "up")
        for port in service.ports:
            *_, published, port_inside = port.split(":")
            address = self._address(service.name, service.networks[-1])
            self._relays.append(Relay(int(published), (address, int(port_inside))))

    def _write_names(self, service: Service) -> None:
        """Write the hosts file and the resolver that `ip netns exec` mounts."""
        folder = _names_folder(self._namespace(service.name))
        folder.mkdir(parents=True)
        peers = {
            other.name: self._address(other.name, network)
            for network in service.networks
            for other in self.services.values()
            if network in other.networks
        }
        names = {"localhost": "127.0.0.1", **peers, service.name: "127.0.0.1"}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        (folder / "resolv.conf").write_text("nameserver 127.0.0.11\noptions ndots:0\n")

    def _start(self, service: Service) -> None:
        namespace = self._namespace(service.name)
        server = [sys.executable, str(ROOT / "tests/helpers/name_server.py"), str(_names_folder(namespace) / "hosts")]
        log = self.logs / f"{service.name}-names.log"
        self._name_servers.append(Supervised(["ip", "netns", "exec", namespace, *server], log, environment()))
        self._name_servers[-1].start()
        log = self.logs / f"{service.name}.log"
        log.touch()
        user, group = service.user.split(":")
        os.chown(log, int(user), int(group))  # nginx opens its standard output by name
        self.running[service.name] = Supervised(self._inside(service, service.command), log, environment())
        self.running[service.name].start()

    def _inside(self, service: Service, command: Sequence[str]) -> list[str]:
        """Return the command in the namespaces of a service: mounts first, then a first process that reaps."""
        steps = ["set -e", *_reachable(Path(sys.base_prefix)), "mount -t tmpfs none /srv", "chmod 755 /srv"]
        steps += ["install -d -m 1777 /srv/home /srv/state /srv/results"]
        for volume in service.volumes:
            source, target = self.project / volume.source, Path(volume.target)
            make = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {target.parent}; touch {target}"
            steps += [make, f"mount --bind {source} {target}"]
            steps += [f"mount -o remount,bind,ro {target}"] if volume.read_only else []
        path = f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {**image_environment(), **service.environment, "PATH": path}
        user, group = service.user.split(":")
        inner = [
            *("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"),
            *("--bounding-set=-all", "--inh-caps=-all", "env", "--chdir=/srv/home"),
            *(f"{name}={value}" for name, value in variables.items()),
            *command,
        ]
        # the shell is the first process of its namespace: it reaps, as `init: true` does
        steps += [f"{shlex.join(inner)} & child=$!", "trap 'kill -TERM $child' TERM", "set +e", "wait $child"]
        return ["ip", "netns", "exec", self._namespace(service.name), *_UNSHARE, "bash", "-c", "\n".join(steps)]


def _names_folder(namespace: str) -> Path:
    return Path("/etc/netns", namespace)


def _reachable(folder: Path) -> list[str]:
    """Return the commands that let everybody enter a folder, where one above it is open to root only."""
    closed = [parent for parent in reversed(folder.parents) if not parent.stat().st_mode & 0o001]
    if not closed:
        return []
    above = closed[0]
    aside = ["mkdir /srv/aside", f"mount --bind {folder} /srv/aside"]
    return [
        *("mount -t tmpfs none /srv", *aside, f"mount -t tmpfs none {above}", f"chmod 755 {above}"),
        *(f"mkdir -p {folder}", f"mount --bind /srv/aside {folder}"),
    ]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
