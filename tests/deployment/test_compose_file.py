"""docker-compose.yml: what it promises holds for every service."""

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from flwr.common.config import parse_config_args

from fedbn_flwr.client.node_memory import STATE_VARIABLE
from fedbn_flwr.deployment.cli import main
from fedbn_flwr.deployment.federation import Federation
from fedbn_flwr.deployment.provision import read_env
from tests.helpers.checkout import ROOT, run
from tests.helpers.compose import COMPOSE, Service, interpolate, read_compose

PROFILES = ("all", "server", "site", "site-gpu")
SITES = Federation.read(ROOT / "federation.example.yaml").sites
#: Flower's commands, and where their options are declared
PARSERS = {
    "fedbn_flwr.deployment.superlink": (
        "flwr.superlink.cli.flower_superlink",
        "_parse_args_run_superlink",
    ),
    "flower-superexec": ("flwr.supercore.cli.flower_superexec", "_parse_args"),
    "fedbn_flwr.deployment.superexec": ("flwr.supercore.cli.flower_superexec", "_parse_args"),
    "fedbn_flwr.deployment.supernode": (
        "flwr.supernode.cli.flower_supernode",
        "_parse_args_run_supernode",
    ),
}


def services() -> list[Service]:
    """The services that stay; the others end when they have done their work."""
    found = [service for profile in PROFILES for service in read_compose(profile, {}).values()]
    return [service for service in found if service.name != "init"]


def named(name: str) -> Service:
    """Return a service by its name."""
    return next(service for service in services() if service.name == name)


every_service = pytest.mark.parametrize("service", services(), ids=lambda service: service.name)


def test_profiles_have_the_services_of_their_machines() -> None:
    server = {"superlink", "superexec", "proxy", "operator"}
    assert set(read_compose("server", {})) == server
    assert set(read_compose("site", {})) == {"init", "node", "exec"}
    assert set(read_compose("site-gpu", {})) == {"init", "node", "exec-gpu"}
    assert set(read_compose("all", {})) == server | {*SITES, *(f"{site}-exec" for site in SITES)}


@every_service
def test_a_service_has_no_rights_and_comes_back(service: Service) -> None:
    assert service.user == "10001:10001"
    assert service.raw["cap_drop"] == ["ALL"]
    assert service.raw["security_opt"] == ["no-new-privileges:true"]
    # it reaps what it starts, comes back, and says how it is
    assert service.raw["init"] is True
    assert service.raw["restart"] == "unless-stopped"
    assert re.fullmatch(
        r"answers https://127\.0\.0\.1:\d+/health /srv/\S+|connected \d+|accepted \d+ /srv/home/accepted",
        service.environment["FEDBN_HEALTH"],
    )


def test_the_curves_are_on_this_machines_loopback_and_change_nothing() -> None:
    (curves,) = read_compose("curves", {}).values()
    assert curves.command == (
        "tensorboard",
        "--logdir=/srv/results",
        "--host=127.0.0.1",
        "--port=6006",
    )
    # a port that Docker publishes on the loopback can be reached by neighbours of this machine
    assert (curves.raw["network_mode"], curves.ports) == ("host", ())
    assert [(volume.target, volume.read_only) for volume in curves.volumes] == [
        ("/srv/results", True)
    ]
    assert (curves.user, curves.raw["cap_drop"]) == ("10001:10001", ["ALL"])
    # written by `superexec`, which has the results of every run
    (results,) = [
        volume for volume in named("superexec").volumes if volume.target == "/srv/results"
    ]
    assert curves.volumes[0].source == results.source


def test_the_service_that_gives_a_kit_to_the_others_has_no_network_and_sees_nothing_else() -> None:
    init = read_compose("site", {})["init"]
    assert init.raw["network_mode"] == "none"
    assert init.raw["cap_drop"] == ["ALL"]
    assert [volume.target for volume in init.volumes] == ["/srv/kit"]


def test_preflight_has_the_user_the_folders_and_the_network_of_the_services() -> None:
    here = read_compose("site", {})
    preflight = read_compose("preflight", {})["preflight"]
    mounts = {(volume.source, volume.target, volume.read_only) for volume in preflight.volumes}
    for service in (here["node"], here["exec"]):
        assert {
            (volume.source, volume.target, volume.read_only) for volume in service.volumes
        } <= mounts
        assert service.user == preflight.user
    assert "fleet" in here["node"].networks
    assert preflight.networks == ("fleet",)


@every_service
def test_flower_knows_every_option(service: Service) -> None:
    for name, (module, function) in PARSERS.items():
        if name in service.command:
            parser: argparse.ArgumentParser = getattr(import_module(module), function)()
            parser.parse_args(service.command[service.command.index(name) + 1 :])
            return
    assert service.command[0] == "nginx"


@pytest.mark.parametrize(
    "name", ["superexec", "exec", "exec-gpu", *(f"{site}-exec" for site in SITES)]
)
def test_apps_see_no_private_key_no_log_and_no_way_out(name: str) -> None:
    service = named(name)
    mounts = {volume.target: volume for volume in service.volumes}
    assert not [target for target in mounts if target.endswith(".key") or target == "/srv/log"]
    for network in service.networks:
        # nor to the machine: the bridge has no address there
        inner = {
            "internal": True,
            "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
        }
        assert yaml.safe_load(COMPOSE.read_text())["networks"][network] == inner
    if name != "superexec":
        state = mounts[service.environment[STATE_VARIABLE]]
        assert state.source.endswith("/state")
        assert not state.read_only
        node = named(service.raw["depends_on"][0])
        (log,) = [volume for volume in node.volumes if volume.target == "/srv/log"]
        assert node.environment["FEDBN_SITE_LOG"] == "/srv/log/sent.jsonl"
        assert log.source.endswith("/log")


@pytest.mark.parametrize("profile", PROFILES)
def test_nothing_shares_a_network_with_the_operators_door_but_what_it_leads_to(
    profile: str,
) -> None:
    here = read_compose(profile, {})
    if "operator" in here:
        networks = set(here["operator"].networks)
        beside = {name for name, service in here.items() if networks & set(service.networks)}
        assert beside == {"operator", "superlink", "superexec", "proxy"}
        assert [name for name, service in here.items() if "operator" in service.networks] == [
            "operator"
        ]


@pytest.mark.parametrize("name", ["node", *SITES])
def test_a_supernode_listens_in_the_network_of_its_site_only(name: str) -> None:
    service = named(name)
    assert "--host=inside" in service.command
    aliases = {
        network: (options or {}).get("aliases")
        for network, options in service.raw["networks"].items()
    }
    assert aliases == {"fleet": None, "site" if name == "node" else name: ["inside"]}


def test_data_and_keys_are_read_only_and_only_state_and_results_are_not() -> None:
    writable = {
        volume.target
        for service in services()
        for volume in service.volumes
        if not volume.read_only
    }
    assert writable == {"/srv/state", "/srv/results", "/srv/models", "/srv/log"}


def test_only_the_sites_ports_are_open_beyond_the_machine() -> None:
    ports = {port for service in services() for port in service.ports}
    assert ports == {"8443:8443", "8445:8445", "127.0.0.1:8444:8444"}


def test_the_sites_of_one_machine_are_those_of_the_example() -> None:
    local = read_compose("all", {})
    for number, site in enumerate(SITES):
        assert (
            f'--node-config=partition-id={number} num-partitions={len(SITES)} site="{site}"'
            in local[site].command
        )
        assert set(local[site].networks) & set(local[f"{site}-exec"].networks) == {site}


def test_a_provisioned_kit_and_server_fill_in_every_variable(out: Path) -> None:
    assert main(["site", "init", str(out / "sites" / "south")]) == 0
    for folder, profile in (
        (out / "sites" / "south", "site"),
        (out / "server", "server"),
        (out, "all"),
    ):
        env = read_env(folder)
        assert env["COMPOSE_PROFILES"] == profile
        for service in read_compose(profile, env).values():
            for volume in service.volumes:
                # data may be empty, and two sites have not made their keys yet
                if (
                    volume.target != "/srv/data"
                    and "/north/" not in volume.source
                    and "/west/" not in volume.source
                ):
                    assert (folder / volume.source).exists(), volume
    node = read_compose("site", read_env(out / "sites" / "south"))["node"]
    assert "--superlink=fl.example.org:8443" in node.command
    assert '--node-config=partition-id=1 num-partitions=3 site="south"' in node.command
    assert (out / "sites" / "south" / "docker-compose.yml").read_text() == COMPOSE.read_text()


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(
    ("given", "data"),
    [
        ({}, {}),
        ({"FEDBN_DATA": "/data/chest x-rays"}, {"data": "folder:{}"}),
        (
            {"FEDBN_DATA": "/data", "FEDBN_READ": "clinic.images:read"},
            {"data": "clinic.images:read"},
        ),
    ],
)
def test_a_site_names_its_data_in_its_node_configuration(
    unit: bool, given: dict[str, str], data: dict[str, str], tmp_path: Path
) -> None:
    env = {"FEDBN_SITE": "south", "FEDBN_PARTITION": "1", "FEDBN_SITES": "3", **given}
    if unit:
        option = _option_of_unit(tmp_path, env)
    else:
        (option,) = [
            word
            for word in read_compose("site", env)["node"].command
            if word.startswith("--node-config=")
        ]
    # in a container the folder has another name
    folder = given.get("FEDBN_DATA", "") if unit else "/srv/data"
    expected = {key: value.format(folder) for key, value in data.items()}
    config = parse_config_args([option.removeprefix("--node-config=")])
    assert config == {"partition-id": 1, "num-partitions": 3, "site": "south", **expected}


def _option_of_unit(folder: Path, env: dict[str, str]) -> str:
    """Return what the systemd unit's command line gives the SuperNode as node configuration."""
    text = (
        (ROOT / "fedbn_flwr/deployment/templates/fedbn-node.service")
        .read_text()
        .replace("\\\n", " ")
    )
    (line,) = re.findall("(?m)^ExecStart=(.*)$", text)
    # systemd: quotes, backslashes and doubled dollars; it replaces ${NAME} itself, so there must be
    # none
    assert not re.search(r"(?<!\$)\$\{", line)
    shell, dash_c, script = re.fullmatch(r"(\S+) (\S+) '(.*)'", line.replace("$$", "$")).groups()  # type: ignore[union-attr]
    script = script.encode().decode("unicode_escape")
    print_words = folder / "print_words"
    print_words.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    print_words.chmod(0o755)
    shown = run(shell, dash_c, script.replace("/opt/fedbn/bin/python", str(print_words)), env=env)
    (option,) = [word for word in shown.splitlines() if word.startswith("--node-config=")]
    return str(option)


def test_interpolation_is_that_of_compose() -> None:
    text = "${A:-x} ${B:-y} ${C:-} ${A} ${A:+${D:-z}!} ${B:+no} ${D:+no}"
    assert interpolate(text, {"A": "1", "B": ""}) == "1 y  1 z!  "
