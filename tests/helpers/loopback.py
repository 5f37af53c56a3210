"""The compose file's services as plain processes on the loopback: any user can run them, with or
without a proxy.

The SuperLink and each site have an address of their own in 127.0.0.0/8. What the compose file says
of paths, names and addresses is replaced by where they are here. A site reaches its server through
a relay, which can be cut.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Self

from fedbn_flwr.deployment.provision import read_env
from fedbn_flwr.transports.side_channel_grid import PORT_VARIABLE
from tests.helpers.checkout import environment
from tests.helpers.compose import Service, image_environment, read_compose
from tests.helpers.federation import Federation, app_hash
from tests.helpers.ports import free_ports
from tests.helpers.processes import kill_processes
from tests.helpers.relay import Relay

#: seconds before a service that has ended is started again
PAUSE = 2.0
#: in the environment of a service and of every process that it starts
_MARK = "FEDBN_FLWR_SERVICE"


class Supervised(Thread):
    """Runs a command again whenever it ends, until it is stopped; `starts` counts how often."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.command, self.log = list(command), log
        self.environment = {**environment, _MARK: str(log)}
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted, self._stopped = Event(), Event()
        self._wanted.set()

    @property
    def mark(self) -> tuple[str, str]:
        """What the environment of the command, and of all that it starts, has."""
        return _MARK, str(self.log)

    def run(self) -> None:
        """Start the command whenever it is not running."""
        while not self._stopped.is_set():
            self._wanted.wait()
            if self._stopped.is_set():
                break
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self.command,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.starts += 1
            self._process.wait()
            self._stopped.wait(PAUSE)

    def kill(self, stay_away: bool = False) -> None:
        """Kill the command with SIGKILL, and not what it has started; with `stay_away` until
        `come_back`.
        """
        if stay_away:
            self._wanted.clear()
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def come_back(self) -> None:
        """Start the command again after `kill(stay_away=True)`."""
        self._wanted.set()

    def stop(self) -> None:
        """End the command and everything that it has started."""
        self._stopped.set()
        self._wanted.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self.is_alive():
            self.join()
        kill_processes(_MARK, str(self.log))

    def text(self) -> str:
        """Return what the command has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


#: numbers of this process' federations, of which several may be there at once
_FEDERATIONS = count()


def has_proxy() -> bool:
    """Return whether the proxy's program is installed."""
    return shutil.which("nginx") is not None


class LoopbackFederation(Federation):
    """A federation whose services run as processes of this machine while the context is open.

    Sites may have folders of data of their own, and allow no app but the project's.
    """

    def __init__(
        self,
        folder: Path,
        sites: tuple[str, ...],
        data: Mapping[str, Path] | None = None,
        only_own_app: bool = False,
    ) -> None:
        self._data, self._only_own_app = dict(data or {}), only_own_app
        self.port, operator_port, exchange_port, self._serverapp_port = free_ports(4)
        self._first = 10 * next(_FEDERATIONS)
        self._superlink = self._address(1)
        hosts = {"server": "127.0.0.1", "also": [self._superlink], "sites": list(sites)}
        ports = {"port": self.port, "operator-port": operator_port, "exchange-port": exchange_port}
        super().__init__(folder, {"name": "hospitals", **hosts, **ports})
        if not has_proxy():
            self._reach_superlink(operator_port)
        target = ("127.0.0.1", self.port) if has_proxy() else (self._superlink, 8000)
        self.relays = {site: Relay(0, target) for site in sites}
        #: what leads each site to the server's side channel
        self.exchange_relays = {site: Relay(0, ("127.0.0.1", exchange_port)) for site in sites}
        self.services: dict[str, Supervised] = {}
        self._add_services()

    def __enter__(self) -> Self:
        """Start every service."""
        for service in self.services.values():
            service.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        for service in self.services.values():
            service.stop()
        for relay in (*self.relays.values(), *self.exchange_relays.values()):
            relay.close()

    def _add_services(self) -> None:
        server = read_compose("server", read_env(self.out / "server"))
        if not has_proxy():
            del server["proxy"], server["operator"]
        for service in server.values():
            self._add(
                service.name, service, self.out / "server", dict.fromkeys(server, self._superlink)
            )
        for number, site in enumerate(self.sites):
            env = {
                **read_env(self.kit(site)),
                "FEDBN_SERVER": f"127.0.0.1:{self.relays[site].port}",
            }
            env["FEDBN_EXCHANGE"] = f"127.0.0.1:{self.exchange_relays[site].port}"
            if site in self._data:
                # the SuperNode names the folder as its apps see it
                env |= {
                    "FEDBN_DATA": str(self._data[site]),
                    "FEDBN_READ": f"folder:{self._data[site]}",
                }
            if self._only_own_app:
                env["FEDBN_APPS"] = f"{'0' * 64},{app_hash(self.app)}"
            services = read_compose("site", env)
            del services["init"]  # the kits have their keys
            for service in services.values():
                addresses = dict.fromkeys(services, self._address(number + 2))
                self._add(f"{site}-{service.name}", service, self.kit(site), addresses)

    def _add(self, name: str, service: Service, folder: Path, addresses: Mapping[str, str]) -> None:
        home, logs = self.folder / "home" / name, self.folder / "logs"
        home.mkdir(parents=True)
        logs.mkdir(exist_ok=True)
        places = _places(service, folder, addresses)
        words = [_replaced(word, places) for word in service.command]
        if words[0] == "nginx":
            config = folder / words[words.index("-c") + 1]
            text = config.read_text().replace("/srv/home", str(home))
            text = text.replace("superlink:8000", f"{self._superlink}:8000")
            # the ServerApp's port is one that no other test run of this machine has
            config.write_text(
                text.replace("superexec:8445", f"{self._superlink}:{self._serverapp_port}")
            )
            # as root, workers would be nobody, who may not enter a test's folder
            words[-1] += " user root;" if os.geteuid() == 0 else ""
        image = {
            key: value.replace("/srv/home", str(home)) for key, value in image_environment().items()
        }
        given = {
            key: _replaced(value.replace("/srv/home", str(home)), places)
            for key, value in service.environment.items()
        }
        if PORT_VARIABLE in given:
            given[PORT_VARIABLE] = str(self._serverapp_port)
        self.services[name] = Supervised(words, logs / f"{name}.log", environment(**image, **given))

    def _address(self, number: int) -> str:
        """Return the address of a machine, that no other federation of this machine has."""
        return f"127.{os.getpid() % 200 + 20}.{self._first + number}.1"

    def _reach_superlink(self, operator_port: int) -> None:
        self.server = f"{self._superlink}:8000"
        config = self.home / "config.toml"
        config.write_text(
            config.read_text().replace(f"127.0.0.1:{operator_port}", f"{self._superlink}:8000")
        )
        self.operator = type(self.operator)(self.home)


def _places(service: Service, folder: Path, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return what stands here for a container's paths and addresses; longer paths first."""
    mounted = sorted(service.volumes, key=lambda volume: -len(volume.target))
    paths = {volume.target: str(folder / volume.source) for volume in mounted}
    # a folder whose files are mounted one by one
    paths |= {
        str(Path(target).parent) + "/": str(Path(source).parent) + "/"
        for target, source in paths.items()
    }
    names = {f"{name}:": f"{address}:" for name, address in addresses.items()}
    return {**paths, **names, "0.0.0.0": addresses[service.name], "inside": addresses[service.name]}


def _replaced(word: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        # a name begins a word or a value, and is not the end of a longer one
        if word.startswith(name):
            word = place + word[len(name) :]
        word = word.replace(f"={name}", f"={place}").replace(f" {name}", f" {place}")
    return word
