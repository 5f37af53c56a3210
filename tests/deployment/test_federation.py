"""The file that describes a federation: what it may hold, and one line for what it may not."""

from pathlib import Path

import pytest

from fedbn_flwr.deployment import DeploymentError
from fedbn_flwr.deployment.federation import Federation
from tests.helpers.checkout import ROOT

#: said of a name that is none
NAMES = "must be lower-case letters, digits and hyphens, at most 63"
GOOD = {"name": "hospitals", "server": "fl.example.org", "sites": ["north", "south"]}


def test_the_example_has_three_sites() -> None:
    federation = Federation.read(ROOT / "federation.example.yaml")
    assert federation.sites == ("north", "south", "west")
    assert federation.address == "fl.example.org:8443"


def test_the_address_of_an_ipv6_server_is_bracketed() -> None:
    assert Federation.from_mapping({**GOOD, "server": "fd00::1"}).address == "[fd00::1]:8443"
    assert (
        Federation.from_mapping({**GOOD, "server": "fd00::1"}).exchange_address == "[fd00::1]:8445"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"servers": "x"},
            "unknown key 'servers'; known: name, server, sites, also, port, operator-port, "
            "exchange-port, days",
        ),
        ({"port": "8443"}, "port must be a whole number, got '8443'"),
        ({"port": True}, "port must be a whole number, got True"),
        ({"port": 80}, "port must be between 1024 and 65535, got 80"),
        ({"port": 8444}, "port and operator-port must differ, both are 8444"),
        ({"port": 8445}, "port and exchange-port must differ, both are 8445"),
        ({"sites": "north"}, "sites must be a list of texts, got 'north'"),
        ({"sites": []}, "sites must list at least one site"),
        ({"sites": ["north", "north"]}, "site 'north' is listed twice"),
        ({"sites": ["../north"]}, f"site '../north' {NAMES}"),
        ({"sites": ["north", "x" * 64]}, f"site '{'x' * 64}' {NAMES}"),
        (
            {"server": "https://fl.example.org"},
            "'https://fl.example.org' is neither a host name nor an address",
        ),
        ({"also": ["a b"]}, "'a b' is neither a host name nor an address"),
        ({"name": 'x"y'}, f"name 'x\"y' {NAMES}"),
        ({"server": "x" * 64}, f"'{'x' * 64}' is neither a host name nor an address"),
        ({"also": ["fl..org"]}, "'fl..org' is neither a host name nor an address"),
        ({"also": ["ſite"]}, "'ſite' is neither a host name nor an address"),
        ({"days": 0}, "days must be between 1 and 36500, got 0"),
        ({"days": 10**7}, "days must be between 1 and 36500, got 10000000"),
        *(({key: None}, f"key '{key}' is missing") for key in GOOD),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, object], reason: str) -> None:
    with pytest.raises(DeploymentError) as error:
        Federation.from_mapping(
            {key: value for key, value in {**GOOD, **change}.items() if value is not None}
        )
    assert str(error.value) == reason


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text"])
def test_a_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(
        DeploymentError, match=r"file\.yaml (is not YAML|must hold keys and values)"
    ):
        Federation.read(tmp_path / "file.yaml")


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(
        "name: a\nserver: one.org\nsites: [north]\nserver: two.org\n"
    )
    with pytest.raises(
        DeploymentError, match=r"file\.yaml is not YAML: line 4 has the key 'server' a second time"
    ):
        Federation.read(tmp_path / "file.yaml")
