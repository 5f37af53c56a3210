"""docker-compose.yml runs: a server and three sites, each service in namespaces of its own, over TLS, with node keys.

The steps are those of docs/deployment.md: provisioning, the sites' keys, registering, runs, status, results. `make
test-deploy` runs all of this and shows its log.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.deployment.site import read_env
from tests.helpers.checkout import ROOT
from tests.helpers.compose import health_check, read_compose
from tests.helpers.federation import OPTIONS, Federation, assert_same_results, await_that, command
from tests.helpers.namespaces import Containers, why_not
from tests.helpers.ports import free_ports

#: before and after FixBN's freeze, with personal BN, and an exchange for each BN layer and direction
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 2, "model": "small-cnn"},
    "fixbn": {"rounds": 2, "model": "small-cnn", "freeze-round": "1"},
    "fedbn": {"rounds": 2, "model": "small-cnn"},
    "fedtan": {"rounds": 1},
}
#: all but one, which stands for the others where time is short
SLOW = ("fedavg", "fixbn", "fedbn")
#: what a site may not reach; paths in other spellings, too: the proxy must pass on what it has checked
CLOSED = (
    "/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/results/",
    "/docs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1//control/list-runs",
)
#: lines of each service's log that are shown
SHOWN = 15

Deployment = tuple[Federation, Containers]

pytestmark = [
    pytest.mark.xdist_group("deployment"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made"),
]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    # not below pytest's own folder, which only root can enter
    folder = Path(tempfile.mkdtemp(prefix="fedbn-deployment-"))
    folder.chmod(0o755)
    try:
        example = yaml.safe_load((ROOT / "federation.example.yaml").read_text())
        ports = dict(zip(("port", "operator-port", "exchange-port"), free_ports(3), strict=True))
        federation = Federation(folder, {**example, **ports})
        logs = folder / "logs"
        logs.mkdir()
        with Containers(read_compose("all", read_env(federation.out)), ROOT, logs) as containers:
            for site in federation.sites:
                containers.shut(site, "fleet", ports["port"], ports["exchange-port"])
            try:
                federation.register()
                yield federation, containers
            finally:
                _show(logs)
    finally:
        shutil.rmtree(folder)


def test_all_sites_are_online_and_all_services_healthy(deployment: Deployment) -> None:
    federation, containers = deployment
    assert federation.online() == set(federation.sites)
    for service in containers.services:
        await_that(lambda name=service: _is_healthy(containers, name), f"{service} is healthy")  # type: ignore[misc]


def test_a_site_reaches_the_fleet_api_and_nothing_else(deployment: Deployment) -> None:
    _, containers = deployment
    answers = {path: _ask(containers, "north", path) for path in CLOSED}
    print("answers to a site:", answers)
    assert answers == dict.fromkeys(CLOSED, "403")
    assert _ask(containers, "north", "/health") == "200"
    # without the signature of a registered key
    assert _ask(containers, "north", "/v1/fleet/pull-messages") == "401"
    assert re.search(r"TLSv1.3 POST /v1/control/list-runs 403", containers.running["proxy"].text())


def test_sites_are_behind_firewalls_that_drop_all_but_two_ports(deployment: Deployment) -> None:
    _, containers = deployment
    # the server's operator port, and the SuperNode of another site, by the network that they share
    for url in (
        f"https://proxy:{containers.services['proxy'].ports[2].split(':')[1]}/health",
        "http://south:9094/health",
    ):
        assert _status(containers, "north", "--insecure", "--max-time", "5", url) == "000"
    # nothing gets into a site
    assert _status(containers, "proxy", "--max-time", "5", "http://north:9094/health") == "000"
    exchange = f"https://proxy:{containers.services['proxy'].ports[1].split(':')[0]}/"
    assert _status(containers, "north", "--cacert", "/srv/kit/ca.crt", exchange) == "403"


def test_apps_of_a_site_reach_nothing_but_their_supernode(deployment: Deployment) -> None:
    _, containers = deployment
    for url in (
        f"https://proxy:{_port(containers)}/health",
        "https://superlink:8000/health",
        "http://south:9094/health",
    ):
        assert _status(containers, "north-exec", "--insecure", url) == "000"
    assert _status(containers, "north-exec", "http://north:9094/health") == "200"
    assert containers.run("north-exec", "test", "-e", "/srv/kit/node.key").returncode != 0


def test_services_run_without_rights(deployment: Deployment) -> None:
    _, containers = deployment
    done = containers.run("superlink", "bash", "-c", "id -u; grep CapEff /proc/self/status; touch /srv/fedbn/ca.crt")
    assert done.stdout.split() == ["10001", "CapEff:", "0000000000000000"]
    assert "Read-only file system" in done.stderr


def test_preflight_at_a_site(deployment: Deployment) -> None:
    federation, containers = deployment
    kit = federation.folder / "kit"
    shutil.copytree(federation.kit("west"), kit)
    env = (kit / ".env").read_text()
    (kit / ".env").write_text(re.sub("(?m)^FEDBN_SERVER=.*", f"FEDBN_SERVER=proxy:{_port(containers)}", env))
    for path in (kit, *kit.rglob("*")):
        shutil.chown(path, 10001, 10001)
    done = containers.run("west", "fedbn-flwr", "preflight", str(kit))
    print(done.stdout)
    assert "TLSv1.3" in done.stdout
    assert "closed to this site (403)" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("method", ["fedtan", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_has_the_bits_of_one_in_process(method: str, deployment: Deployment, tmp_path: Path) -> None:
    federation, _ = deployment
    there, here = federation.both({**OPTIONS, **METHODS[method], "method": method}, tmp_path)
    command("status", "--operator", federation.home)
    command("fetch", there.name, "--operator", federation.home, "--out", tmp_path / "fetched")
    assert_same_results(tmp_path / "fetched" / there.name, here)
    if method == "fedtan":
        # mean and variance at once, and gradients, of the one BN layer
        shown = federation.log(there.name)
        assert re.search(r"2 exchanges over the side channel", shown)
        assert "by messages" not in shown


@pytest.mark.slow
def test_a_revoked_site_is_shut_out(deployment: Deployment) -> None:
    federation, containers = deployment
    node = containers.running["west"]
    command("site", "revoke", "west", "--operator", federation.home)
    starts = node.starts
    # the SuperNode ends, is started again by its restart policy, and is refused
    await_that(lambda: node.starts > starts + 1, "the SuperNode of a revoked site ends")
    federation.await_online(["north", "south"])


def _is_healthy(containers: Containers, service: str) -> bool:
    """Run the image's health check in a service."""
    done = containers.run(service, *health_check())
    print(f"health of {service}: {done.stdout.strip()}{done.stderr.strip()}")
    return done.returncode == 0


def _ask(containers: Containers, service: str, path: str) -> str:
    """Return the status of a GET or POST to the proxy."""
    method = "GET" if path in ("/health", "/docs", "/results/") else "POST"
    words = ["--request", method, "--path-as-is", "--cacert", "/srv/kit/ca.crt"]
    words += ["--header", "content-type: application/protobuf", "--data-binary", ""] if method == "POST" else []
    return _status(containers, service, *words, f"https://proxy:{_port(containers)}{path}")


def _status(containers: Containers, service: str, *words: str) -> str:
    """Return the status of curl's request, or 000 if nobody answers."""
    command = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "60", *words)
    return containers.run(service, *command).stdout.strip()


def _port(containers: Containers) -> str:
    return containers.services["proxy"].ports[0].split(":")[0]


def _show(logs: Path) -> None:
    for path in sorted(logs.iterdir()):
        lines = path.read_text(errors="replace").splitlines()
        print(
            f"---- {path.stem}: {len(lines)} lines", *lines[:SHOWN], *(["..."] if len(lines) > SHOWN else []), sep="\n"
        )
