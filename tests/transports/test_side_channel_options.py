"""Where a side channel comes from: a run's options, completed by the environment of the
ServerApp.
"""

from pathlib import Path

import pytest

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import UsageError, resolve
from fedbn_flwr.experiments.flower_run import with_side_channel
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.transports.side_channel_grid import (
    ADDRESS_VARIABLE,
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    PORT_VARIABLE,
    SideChannelGrid,
    SideChannelOptions,
)
from tests.helpers.concurrent_nodes import make_client

VARIABLES = (PORT_VARIABLE, ADDRESS_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_port_there_is_none() -> None:
    assert SideChannelOptions.of(-1, "", 1.0) is None
    assert SideChannelOptions.of(0, "server:1", 1.0) is None


def test_the_environment_completes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("8445", "server:8446", "none", ""), strict=True):
        monkeypatch.setenv(name, value)
    assert SideChannelOptions.of(-1, "", 1.0) == SideChannelOptions(8445, "server:8446", None, 1.0)
    assert SideChannelOptions.of(7000, "other:7001", 1.0) == SideChannelOptions(
        7000, "other:7001", None, 1.0
    )
    assert SideChannelOptions.of(0, "", 1.0) is None


def test_a_port_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_VARIABLE, "")
    assert SideChannelOptions.of(-1, "", 1.0) is None
    monkeypatch.setenv(PORT_VARIABLE, "http")
    with pytest.raises(ValueError, match=f"{PORT_VARIABLE} must be .* got 'http'"):
        SideChannelOptions.of(-1, "", 1.0)


@pytest.mark.parametrize("address", ["", "server", "server:", ":8445", "server:http"])
def test_an_address_that_sites_cannot_use_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATE_VARIABLE, "none")
    with pytest.raises(ValueError, match=f"exchange-address must be HOST:PORT .* got '{address}'"):
        SideChannelOptions.of(8445, address, 1.0)


def test_a_port_without_certificates_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=CERTIFICATE_VARIABLE):
        SideChannelOptions.of(8445, "server:8445", 1.0)
    for name, content in ((CERTIFICATE_VARIABLE, b"certificate"), (KEY_VARIABLE, b"key")):
        (tmp_path / name).write_bytes(content)
        monkeypatch.setenv(name, str(tmp_path / name))
    options = SideChannelOptions.of(8445, "server:8445", 1.0)
    assert options is not None
    assert options.certificates == (b"key", b"certificate")


def test_a_run_has_a_channel_if_its_method_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CERTIFICATE_VARIABLE, "none")
    grid, asked = (
        InProcessGrid(client_app(make_client), 2),
        {"exchange-port": 8445, "exchange-address": "server:1"},
    )
    assert isinstance(
        with_side_channel(grid, resolve({"method": "fedtan", **asked})), SideChannelGrid
    )
    assert isinstance(
        with_side_channel(grid, resolve({"method": "feddna", **asked})), SideChannelGrid
    )
    assert with_side_channel(grid, resolve({"method": "fedavg", **asked})) is grid
    assert with_side_channel(grid, resolve({"method": "fedtan"})) is grid
    with pytest.raises(UsageError, match="exchange-address"):
        with_side_channel(grid, resolve({"method": "fedtan", "exchange-port": 8445}))
    with pytest.raises(UsageError, match="exchange-port must be at least -1"):
        resolve({"method": "fedtan", "exchange-port": -2})
