"""The services of docker-compose.yml as real containers, in projects of their own that are taken away at the end."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Self

from tests.helpers.checkout import ROOT, copy_checkout, run
from tests.helpers.federation import OPTIONS, Federation, await_that
from tests.helpers.ports import free_ports
from tests.helpers.waiting import PATIENCE

IMAGE = f"fedbn-flwr-test-{os.getpid()}"
#: in the environment of who wants containers
ASKED = "FEDBN_TEST_DOCKER"
#: further arguments of `docker build`, such as where PyTorch is
ARGUMENTS = "FEDBN_DOCKER_BUILD"


def why_not() -> str:
    """Return why there are no containers here, or why they are not asked for; nothing if there are."""
    if ASKED not in os.environ:
        return "`make test-docker` runs it"
    if not shutil.which("docker"):
        return "Docker is not installed: apt-get install docker.io docker-compose-v2, or docs.docker.com/engine/install"
    for words in (("docker", "info", "--format", "{{.ServerVersion}}"), ("docker", "compose", "version")):
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
        if done.returncode:
            return f"`{' '.join(words[:2])}` fails: {' '.join(done.stderr.split())}"
    return ""


def build(context: Path) -> None:
    """Build the image as the documentation says."""
    more = shlex.split(os.environ.get(ARGUMENTS, ""))
    run("docker", "build", *more, "--tag", IMAGE, ".", cwd=context)


def inside(container: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a container that runs."""
    return subprocess.run(
        ["docker", "exec", container, *words], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def in_image(folder: Path, *words: str, entrypoint: str = "fedbn-flwr") -> str:
    """Run the image's own command with a folder of this machine, as its documentation does."""
    mine = ("--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{folder}:{folder}", "--workdir", str(folder))
    return run("docker", "run", "--rm", "--network", "host", *mine, "--entrypoint", entrypoint, IMAGE, *words)


class Project:
    """A project of Compose."""

    def __init__(self, folder: Path, env: Path, name: str) -> None:
        self.name, self._folder = name, folder
        self._words = ("docker", "compose", "--project-name", name, "--env-file", str(env))
        self._env = {**os.environ, "FEDBN_IMAGE": IMAGE}

    def run(self, *words: str) -> str:
        """Run a command of Compose."""
        return run(*self._words, *words, cwd=self._folder, env=self._env)

    def fails(self, *words: str) -> str:
        """Run a command of Compose that must fail; returns what it printed."""
        done = subprocess.run(
            [*self._words, *words], cwd=self._folder, env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        return done.stdout + done.stderr

    def container(self, service: str) -> str:
        """Return the name of a service's container."""
        return f"{self.name}-{service}-1"

    def state(self, service: str) -> dict[str, object]:
        """Return what Docker says of a service."""
        return dict(json.loads(run("docker", "inspect", "--format", "{{json .State}}", self.container(service))))

    def addresses(self, service: str) -> list[str]:
        """Return a container's addresses."""
        shown = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        return run("docker", "inspect", "--format", shown, self.container(service)).split()

    def is_healthy(self, service: str) -> bool:
        """Run the image's health check in a service."""
        return inside(self.container(service), "python", "-m", "fedbn_flwr.deployment.health").returncode == 0

    def die(self, service: str) -> None:
        """Let a service's process die, as by an error: `docker kill` would count as the wish to stop it."""
        os.kill(int(str(self.state(service)["Pid"])), 9)

    def down(self) -> None:
        """Take containers and networks away."""
        subprocess.run(
            [*self._words, "down", "--timeout", "1", "--remove-orphans"], cwd=self._folder, env=self._env, check=False
        )


class DockerFederation(Federation):
    """Server and three sites of one project, and the kit of a fourth site."""

    def __init__(self, folder: Path) -> None:
        subnet = "{{(index .IPAM.Config 0).Subnet}}"
        #: where containers of other networks reach this machine
        self.host = str(ip_network(run("docker", "network", "inspect", "bridge", "--format", subnet).strip())[1])
        self.ports = dict(zip(("port", "operator-port", "exchange-port"), free_ports(3), strict=True))
        sites = ["north", "south", "west", "east"]
        super().__init__(folder, {"name": "hospitals", "server": self.host, "sites": sites, **self.ports})
        self.sites = ("north", "south", "west")
        self.all = Project(ROOT, self.out / ".env", f"{IMAGE}_all")

    def __enter__(self) -> Self:
        """Start everything but the fourth site."""
        self.all.run("up", "--detach", "--no-build")
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        print(self.all.run("logs", "--no-color", "--tail", "8"))
        self.all.down()

    def both(self, options: Mapping[str, object], folder: Path) -> tuple[Path, Path]:
        """Run in the federation, and in one process of the same image; returns the two folders of results."""
        number = self.submit({**OPTIONS, "clients": len(self.sites), **options})
        words = [str(word) for key, value in {**OPTIONS, **options}.items() for word in (f"--{key}", value)]
        words += ["--clients", str(len(self.sites)), "--engine", "inprocess", "--device", "cpu"]
        in_image(folder, "run", *words, "--results-dir", str(folder / "here"))
        assert self.await_end(number) == "finished:completed", self.log(number)
        return self.results(number), folder / "here"

    def await_healthy(self) -> None:
        """Wait until every service is well."""
        for service in self.all.run("ps", "--services").split():
            await_that(lambda name=service: self.all.is_healthy(name), f"{service} is healthy")  # type: ignore[misc]


def checkout_with_secrets(folder: Path) -> Path:
    """Return a clone in which an environment and the keys of a federation lie, as they do in a working one."""
    checkout = copy_checkout(folder / "fedbn-flwr")
    for name in (".venv/bin/python", "federation/ca/ca.key"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text("secret")
    return checkout
