"""docker-compose.yml under Docker: the image, server and sites as containers, what they reach, and
what outlives them.

`make test-docker` runs this. It needs a Docker daemon with Compose, and root for the neighbour and
for processes that die. The image's base is pulled, or must be there; FEDBN_DOCKER_BUILD has further
arguments of `docker build`.
"""

import http.client
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_network
from pathlib import Path
from threading import Thread
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedbn_flwr.models import build as build_model
from tests.helpers.checkout import ROOT, copy_checkout, run
from tests.helpers.federation import OPTIONS, Federation, assert_same_results, await_that, command
from tests.helpers.ports import free_ports
from tests.helpers.runs import run_in
from tests.helpers.waiting import PATIENCE

IMAGE = f"fedbn-flwr-test-{os.getpid()}"
#: in the environment of who wants containers
ASKED = "FEDBN_TEST_DOCKER"
#: further arguments of `docker build`, such as where PyTorch is
ARGUMENTS = "FEDBN_DOCKER_BUILD"


def why_not() -> str:
    """Return why there are no containers here, or why they are not asked for.

    Nothing if there are.
    """
    if ASKED not in os.environ:
        return "`make test-docker` runs it"
    if not shutil.which("docker"):
        return (
            "Docker is not installed: apt-get install docker.io docker-compose-v2, or "
            "docs.docker.com/engine/install"
        )
    for words in (
        ("docker", "info", "--format", "{{.ServerVersion}}"),
        ("docker", "compose", "version"),
    ):
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
        ["docker", "exec", container, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def in_image(folder: Path, *words: str, entrypoint: str = "fedbn-flwr") -> str:
    """Run the image's own command with a folder of this machine, as its documentation does."""
    mine = (
        "--user",
        f"{os.getuid()}:{os.getgid()}",
        "--volume",
        f"{folder}:{folder}",
        "--workdir",
        str(folder),
    )
    return run(
        "docker",
        "run",
        "--rm",
        "--network",
        "host",
        *mine,
        "--entrypoint",
        entrypoint,
        IMAGE,
        *words,
    )


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
            [*self._words, *words],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        return done.stdout + done.stderr

    def container(self, service: str) -> str:
        """Return the name of a service's container."""
        return f"{self.name}-{service}-1"

    def state(self, service: str) -> dict[str, object]:
        """Return what Docker says of a service."""
        return dict(
            json.loads(
                run("docker", "inspect", "--format", "{{json .State}}", self.container(service))
            )
        )

    def addresses(self, service: str) -> list[str]:
        """Return a container's addresses."""
        shown = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        return run("docker", "inspect", "--format", shown, self.container(service)).split()

    def is_healthy(self, service: str) -> bool:
        """Run the image's health check in a service."""
        return (
            inside(
                self.container(service), "python", "-m", "fedbn_flwr.deployment.health"
            ).returncode
            == 0
        )

    def die(self, service: str) -> None:
        """Let a service's process die, as by an error: `docker kill` would count as the wish to
        stop it.
        """
        os.kill(int(str(self.state(service)["Pid"])), 9)

    def down(self) -> None:
        """Take containers and networks away."""
        subprocess.run(
            [*self._words, "down", "--timeout", "1", "--remove-orphans"],
            cwd=self._folder,
            env=self._env,
            check=False,
        )


class DockerFederation(Federation):
    """Server and three sites of one project, and the kit of a fourth site."""

    def __init__(self, folder: Path) -> None:
        subnet = "{{(index .IPAM.Config 0).Subnet}}"
        #: where containers of other networks reach this machine
        self.host = str(
            ip_network(run("docker", "network", "inspect", "bridge", "--format", subnet).strip())[1]
        )
        self.ports = dict(
            zip(("port", "operator-port", "exchange-port"), free_ports(3), strict=True)
        )
        sites = ["north", "south", "west", "east"]
        super().__init__(
            folder, {"name": "hospitals", "server": self.host, "sites": sites, **self.ports}
        )
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
        """Run in the federation, and in one process of the same image.

        Returns the two folders of results.
        """
        number = self.submit({**OPTIONS, "clients": len(self.sites), **options})
        words = [
            str(word)
            for key, value in {**OPTIONS, **options}.items()
            for word in (f"--{key}", value)
        ]
        words += ["--clients", str(len(self.sites)), "--engine", "inprocess", "--device", "cpu"]
        in_image(folder, "run", *words, "--results-dir", str(folder / "here"))
        assert self.await_end(number) == "finished:completed", self.log(number)
        return self.results(number), run_in(folder / "here")

    def await_healthy(self) -> None:
        """Wait until every service is well."""
        for service in self.all.run("ps", "--services").split():
            await_that(lambda name=service: self.all.is_healthy(name), f"{service} is healthy")  # type: ignore[misc]


def checkout_with_secrets(folder: Path) -> Path:
    """Return a clone in which an environment and the keys of a federation lie, as they do in a
    working one.
    """
    checkout = copy_checkout(folder / "fedbn-flwr")
    for name in (".venv/bin/python", "federation/ca/ca.key"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text("secret")
    return checkout


#: a layer-wise one needs the side channel
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 3, "model": "small-cnn"},
    "fedtan": {"rounds": 2},
}
#: what a site may not reach; paths in other spellings, too: the proxy must pass on what it has
#: checked
CLOSED = (
    "/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/results/",
    "/docs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1//control/list-runs",
)
#: asks as a site does: the addresses to connect to, each with the method and path of a request
ASK = """
import http.client, ssl, sys
host, port, *paths = sys.argv[1:]
context = ssl.create_default_context(cafile="/srv/kit/ca.crt")
context.check_hostname = False
for path in paths:
    try:
        door = http.client.HTTPSConnection(host, int(port), timeout=5, context=context)
        method = "GET" if path in ("/health", "/docs", "/results/") else "POST"
        door.request(method, path, headers={"content-type": "application/protobuf"})
        print(door.getresponse().status)
    except OSError:
        print("nobody")
"""
#: connects to addresses of this machine
CONNECT = """
import socket, sys
for address in sys.argv[2:]:
    try:
        socket.create_connection((address, int(sys.argv[1])), 1)
        print(address)
    except OSError:
        pass
"""
#: of an operator who has a kit's certificate and no key
LIST = """
mkdir -p /tmp/flwr && cd /tmp/flwr
printf '[superlink]\\ndefault = "x"\\n[superlink.x]\\naddress = "%s"\\n' "$0" > config.toml
echo 'root-certificates = "/srv/kit/ca.crt"' >> config.toml
FLWR_HOME=/tmp/flwr timeout 60 flwr list x --format json
"""

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The image, made from a checkout in which secrets lie."""
    checkout = checkout_with_secrets(tmp_path_factory.mktemp("image"))
    build(checkout)
    yield checkout
    run("docker", "image", "rm", "--force", IMAGE)


@pytest.fixture(scope="module")
def federation(image: Path) -> Iterator[DockerFederation]:
    folder = Path(tempfile.mkdtemp(prefix="fedbn-docker-"))
    folder.chmod(0o755)
    try:
        with DockerFederation(folder) as federation:
            federation.await_answer()
            await_that(lambda: _refused(federation), "sites are refused")
            federation.register()
            federation.await_healthy()
            yield federation
    finally:
        shutil.rmtree(folder)


def _refused(federation: DockerFederation) -> bool:
    """Whether a SuperNode says so.

    Until its key is registered, it is connected and must not be healthy.
    """
    assert not federation.all.is_healthy("north")
    return "Failed to activate" in federation.all.run("logs", "north")


@pytest.fixture
def neighbour() -> Iterator[str]:
    """A machine in the network of this one, which knows a way to the containers.

    Firewalls let all through.
    """
    name, policy = (
        f"fbn{os.getpid()}"[:12],
        run("iptables", "-S", "FORWARD").split("\n")[0].split()[-1],
    )
    steps = (
        f"ip netns add {name}",
        f"ip link add {name} type veth peer name eth0 netns {name}",
        f"ip addr add 198.18.7.1/24 dev {name}",
        f"ip link set {name} up",
        f"ip -n {name} addr add 198.18.7.2/24 dev eth0",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} route add default via 198.18.7.1",
        "iptables -P FORWARD ACCEPT",
    )
    try:
        for step in steps:
            run(*step.split())
        yield name
    finally:
        run("iptables", "-P", "FORWARD", policy)
        run("ip", "link", "del", name)
        run("ip", "netns", "del", name)


@pytest.mark.usefixtures("image")
def test_the_image_is_small() -> None:
    size = int(run("docker", "image", "inspect", "--format", "{{.Size}}", IMAGE))
    print(f"image: {size / 1e9:.2f} GB")
    assert size < 2e9


def test_a_build_is_sent_what_the_dockerfile_copies(image: Path) -> None:
    (image / "Probe").write_text(f"FROM {IMAGE}\nCOPY . /context\n")
    run("docker", "build", "--file", "Probe", "--tag", f"{IMAGE}-probe", ".", cwd=image)
    sent = run(
        "docker", "run", "--rm", "--entrypoint", "ls", f"{IMAGE}-probe", "-A", "/context"
    ).split()
    run("docker", "image", "rm", "--force", f"{IMAGE}-probe")
    assert set(sent) == {
        "LICENSE",
        "README.md",
        "docker-compose.yml",
        "fedbn_flwr",
        "hatch_build.py",
        "image.lock",
        "pyproject.toml",
        "recipes",
        "strategies",
    }


def test_a_change_of_the_code_installs_no_package_again(image: Path, tmp_path: Path) -> None:
    def installed() -> str:
        return in_image(
            tmp_path,
            "-c",
            "import os, torch; print(os.stat(torch.__path__[0]).st_mtime)",
            entrypoint="python",
        )

    before = installed()
    for name in ("pyproject.toml", "fedbn_flwr/__init__.py"):
        with (image / name).open("a") as file:
            file.write("# changed\n")
    started = time.monotonic()
    build(image)
    print(f"a change of the code: rebuilt in {time.monotonic() - started:.0f} s")
    assert installed() == before


def test_the_image_has_the_command_and_a_home_that_everybody_can_write_to(
    image: Path, tmp_path: Path
) -> None:
    assert in_image(tmp_path, "--help").startswith("usage: fedbn-flwr")
    words = (
        "--user",
        "4711:4711",
        "--entrypoint",
        "mkdir",
        IMAGE,
        "-p",
        "/srv/home/.cache/x",
        "/srv/home/flwr",
    )
    run("docker", "run", "--rm", *words)


def test_the_operators_door_opens_to_nobody_without_the_key(federation: DockerFederation) -> None:
    port = str(federation.ports["operator-port"])
    # a site's node has only the kit's certificate
    for host in ("proxy", "operator", federation.host, *federation.all.addresses("operator")):
        listed = inside(federation.all.container("north"), "sh", "-c", LIST, f"{host}:{port}")
        assert '"success": false' in listed.stdout, (host, listed)
    # neither has whoever is on this machine
    context = ssl.create_default_context(cafile=federation.home / "ca.crt")
    door = http.client.HTTPSConnection("127.0.0.1", int(port), context=context)
    door.request("GET", "/health")
    assert door.getresponse().status == 401
    assert federation.operator.nodes()
    # it has written down who has registered the sites, and when
    orders = re.findall(
        r"T\S+ [\d.]+ /v1/control/register-node 200", federation.all.run("logs", "operator")
    )
    assert len(orders) == len(federation.sites)


@as_root
def test_a_neighbour_gets_no_further_than_the_doors(
    federation: DockerFederation, neighbour: str
) -> None:
    def ask(url: str) -> str:
        words = (
            "curl",
            "--silent",
            "--insecure",
            "--max-time",
            "5",
            "--output",
            "/dev/null",
            "--write-out",
        )
        done = subprocess.run(
            ("ip", "netns", "exec", neighbour, *words, "%{http_code}", url),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    port = federation.ports["operator-port"]
    answers = [ask(f"https://{address}:{port}/{path}") for address in federation.all.addresses("operator")
               for path in ("health", "results/")]  # fmt: skip
    # one of its networks can be reached, which shows that the way is there
    assert set(answers) == {"401", "000"}
    for service, url in (
        ("north", "http://{}:9094/health"),
        ("superlink", "https://{}:8000/health"),
    ):
        for address in federation.all.addresses(service):
            assert ask(url.format(address)) == "000", (service, address)


def test_a_site_reaches_the_fleet_api_and_nothing_else(federation: DockerFederation) -> None:
    north, port = federation.all.container("north"), str(federation.ports["port"])
    assert inside(north, "python", "-c", ASK, "proxy", port, *CLOSED).stdout.split() == [
        "403"
    ] * len(CLOSED)
    # the second one without the signature of a registered key
    paths = ("/health", "/v1/fleet/pull-messages")
    assert inside(north, "python", "-c", ASK, "proxy", port, *paths).stdout.split() == [
        "200",
        "401",
    ]
    assert inside(north, "python", "-c", CONNECT, "9094", "south").stdout == ""


def test_an_app_reaches_its_supernode_and_neither_this_machine_nor_any_other(
    federation: DockerFederation,
) -> None:
    apps = federation.all.container("north-exec")
    server = HTTPServer(("0.0.0.0", 0), BaseHTTPRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    mine = re.findall(r"inet ([\d.]+)", run("ip", "-4", "addr"))
    others = [address for name in ("proxy", "operator", "superlink", "south") for address in
              federation.all.addresses(name)]  # fmt: skip
    try:
        port = str(server.server_address[1])
        own = [address for address in mine if not address.startswith("127.")]
        assert inside(apps, "python", "-c", CONNECT, port, *own).stdout == ""
        assert (
            inside(federation.all.container("north"), "python", "-c", CONNECT, port, *own).stdout
            != ""
        )
    finally:
        server.shutdown()
    for port in map(str, (*federation.ports.values(), 8000, 9094)):
        assert inside(apps, "python", "-c", CONNECT, port, *others).stdout == ""
    assert inside(apps, "python", "-c", CONNECT, "9094", "north").stdout == "north\n"
    assert inside(apps, "test", "-e", "/srv/kit/node.key").returncode != 0


def test_services_run_without_rights(federation: DockerFederation) -> None:
    words = ("sh", "-c", "id -u; grep CapEff /proc/self/status; touch /srv/fedbn/ca.crt")
    done = inside(federation.all.container("superlink"), *words)
    assert done.stdout.split() == ["10001", "CapEff:", "0000000000000000"]
    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_the_bits_of_one_in_process(
    method: str, federation: DockerFederation, tmp_path: Path
) -> None:
    there, here = federation.both({**METHODS[method], "method": method}, tmp_path)
    assert_same_results(there, here)
    seconds = re.findall(r'"seconds": ([\d.]+)', (there / "rounds.jsonl").read_text())
    print(f"{method}: {', '.join(seconds)} s a round")
    assert not re.search("[0-9a-f]{64}", (there / "config.json").read_text())
    if method == "fedtan":
        # of the three of a model with one BN layer, the first connects, and the last brings models,
        # by Flower
        timed = re.findall(r"(\d+) exchanges over the side channel", federation.log(there.name))
        assert timed == ["1"] * METHODS[method]["rounds"]


def test_a_trained_network_is_fine_tuned_from_the_servers_folder_of_weights(
    federation: DockerFederation,
) -> None:
    weights = federation.out / "server" / "weights" / "network.safetensors"
    start = build_model(
        "timm:test_efficientnet", num_classes=10, in_channels=3, seed=5
    ).state_dict()
    save_file(start, weights)
    weights.chmod(0o644)
    asked = {
        "method": "fedavg",
        "freeze-bn": True,
        "model": "timm:test_efficientnet",
        "image-size": 32,
        "lr": 0.01,
    }
    number = federation.submit(
        {
            **OPTIONS,
            **asked,
            "clients": 3,
            "rounds": 2,
            "init-from": "/srv/weights/network.safetensors",
        }
    )
    assert federation.await_end(number) == "finished:completed", federation.log(number)
    end = load_file(federation.results(number) / "model.safetensors")
    frozen = [name for name in start if name.endswith(("running_mean", "running_var"))]
    assert frozen
    assert all(torch.equal(end[name], start[name]) for name in frozen)
    assert not torch.equal(end["classifier.weight"], start["classifier.weight"])
    # its head in one exchange
    number = federation.submit(
        {
            **OPTIONS,
            "method": "fed3r",
            "model": "timm:test_efficientnet",
            "image-size": 32,
            "clients": 3,
            "rounds": 2,
            "init-from": "/srv/weights/network.safetensors",
        }
    )
    assert federation.await_end(number) == "finished:completed", federation.log(number)
    end = load_file(federation.results(number) / "model.safetensors")
    changed = {name for name in start if not torch.equal(end[name], start[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    # a file that is not there costs a line, and no round
    number = federation.submit(
        {**OPTIONS, **asked, "clients": 3, "rounds": 2, "init-from": "/srv/weights/other.pth"}
    )
    assert federation.await_end(number) == "finished:failed"
    assert "no weights: there is no file /srv/weights/other.pth for init-from" in federation.log(
        number
    )


@as_root
def test_a_kit_that_root_has_copied_takes_part_in_minutes(
    federation: DockerFederation, tmp_path: Path
) -> None:
    kit, data = federation.folder / "kit", federation.folder / "images"
    shutil.copytree(federation.kit("east"), kit)
    for path in (kit / "node.key", kit / "east.pub", kit / "superexec.secret"):
        path.unlink()
    (kit / "log").rmdir()  # an archive may leave out empty folders
    for path in (kit, *kit.rglob("*")):
        os.chown(path, 0, 0)
    for role in ("train", "test"):
        (data / role / "normal").mkdir(parents=True)
        (data / role / "normal" / "0.png").write_bytes(b"png")
    for path in (data, *data.rglob("*")):
        os.chown(path, 4711, 4712)
        path.chmod(0o700)
    env = re.sub("FEDBN_USER=.*\n", "", (kit / ".env").read_text())
    (kit / ".env").write_text(env.replace("FEDBN_DATA=\n", f"FEDBN_DATA={data}\n"))
    site = Project(kit, kit / ".env", f"{IMAGE}_east")
    try:
        shown = site.fails("run", "--rm", "preflight")
        assert "/srv/data cannot be read by user 10001:10001, it belongs to 4711:4712" in shown
        (kit / ".env").write_text(
            re.sub("FEDBN_USER=.*", "FEDBN_USER=4711:4712", (kit / ".env").read_text())
        )
        image = data / "train" / "normal" / "0.png"
        os.chown(image, 0, 0)
        shown = site.fails("run", "--rm", "preflight")
        assert (
            "/srv/data/train/normal/0.png cannot be read by user 4711:4712, it belongs to 0:0"
            in shown
        )
        os.chown(image, 4711, 4712)
        os.chown(kit / "state", 0, 0)
        shown = site.fails("run", "--rm", "--no-deps", "preflight")
        assert (
            "state cannot be written by user 4711:4712 (Permission denied): `docker compose run "
            "--rm init`" in shown
        )
        shown = site.run("run", "--rm", "preflight")
        print(shown)
        for line in (
            "ok       exchange",
            "warning  registered not yet",
            "ok       folders",
            "this site can take part",
        ):
            assert line in shown
        # beside a project of the same federation that has services of the same names
        site.run("up", "--detach", "--no-build")
        command("site", "register", kit / "east.pub", "--operator", federation.home)
        assert "ok       registered" in site.run("run", "--rm", "preflight")
        await_that(
            lambda: site.is_healthy("node") and site.is_healthy("exec"),
            "the fourth site is healthy",
        )
        # shut out, its SuperNode ends, is started again by Docker, and is refused
        command("site", "revoke", "east", "--operator", federation.home)
        await_that(lambda: not site.is_healthy("node"), "a revoked site is not healthy")
    finally:
        site.down()


@as_root
def test_what_dies_comes_back_and_what_is_stopped_stays_away(
    federation: DockerFederation, tmp_path: Path
) -> None:
    services = ("north", "north-exec", "superlink", "superexec", "proxy", "operator")
    before = {service: federation.all.state(service)["StartedAt"] for service in services}
    for service in services:
        federation.all.die(service)

    def began_again(service: str) -> bool:
        return bool(federation.all.state(service)["StartedAt"] != before[service])

    for service in services:
        await_that(partial(began_again, service), service)
    federation.await_healthy()
    federation.await_online(federation.sites)
    # Docker takes it for the wish to stop the service
    run("docker", "kill", federation.all.container("south"))
    time.sleep(5)
    assert federation.all.state("south")["Running"] is False
    federation.all.run("up", "--detach", "--no-build")
    federation.await_healthy()
    assert_same_results(
        *federation.both({"method": "fedbn", "statistics": "own", "rounds": 2}, tmp_path)
    )
