"""`fedbn-flwr preflight` at a site, against a server with the federation's certificate."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.supercore.error import ApiErrorCode

from fedbn_flwr.deployment import DeploymentError
from fedbn_flwr.deployment import preflight as module
from fedbn_flwr.deployment.cli import main
from fedbn_flwr.deployment.keys import make_server_certificate
from tests.helpers.checkout import ROOT
from tests.helpers.processes import largest_file
from tests.helpers.tls_server import TLSServer


@pytest.fixture
def kit(out: Path) -> Iterator[Path]:
    """A kit whose server answers on the loopback."""
    home = out / "sites" / "south"
    assert main(["site", "init", str(home)]) == 0
    known = json.dumps(
        {
            "code": ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL,
            "detail": "as to a key that is known",
        }
    )
    pages = {"/health": b"{}", "/v1/fleet/activate-node": known.encode()}
    with TLSServer(out / "server", pages) as server:
        address = f"127.0.0.1:{server.port}"
        change(home, FEDBN_SERVER=address, FEDBN_EXCHANGE=address)
        yield home


def change(kit: Path, **values: str) -> None:
    lines = (kit / ".env").read_text().splitlines()
    kept = [line for line in lines if line.split("=")[0] not in values]
    (kit / ".env").write_text(
        "\n".join([*kept, *(f"{name}={value}" for name, value in values.items())]) + "\n"
    )


def checks(kit: Path) -> dict[str, tuple[str, str]]:
    """Verdict and text by name; of several of one name the last."""
    return {check.name: (check.verdict, check.text) for check in module.preflight(kit)}


def test_a_site_that_can_take_part(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(kit, COMPOSE_PROFILES="site")
    found = checks(kit)
    assert {name for name, (verdict, _) in found.items() if verdict == "failed"} == set()
    assert found["registered"] == ("ok", "the server knows this site's key")
    assert found["control"] == ("ok", "closed to this site (403)")
    assert "TLSv1.3, certificate valid for 36" in found["tls"][1]
    assert main(["preflight", str(kit)]) == 0
    assert "this site can take part" in capsys.readouterr().out


def test_a_server_of_another_federation_is_refused_and_the_other_checks_go_on(
    kit: Path, tmp_path: Path
) -> None:
    assert (
        main(["provision", str(ROOT / "federation.example.yaml"), "--out", str(tmp_path / "other")])
        == 0
    )
    (kit / "ca.crt").write_bytes((tmp_path / "other" / "ca" / "ca.crt").read_bytes())
    found = checks(kit)
    assert found["tls"][0] == "failed"
    assert found["tls"][1].startswith("the server's certificate is refused: ")
    assert found["key"][0] == "ok"
    assert main(["preflight", str(kit)]) == 1


def test_a_certificate_that_has_expired_is_named_with_its_date(kit: Path, tmp_path: Path) -> None:
    ca, hosts = tmp_path / "federation" / "ca", ["127.0.0.1"]
    make_server_certificate(ca / "ca.crt", ca / "ca.key", hosts, 0, tmp_path)
    ended = datetime.now(UTC)
    with TLSServer(tmp_path, {}) as server:
        change(kit, FEDBN_SERVER=f"127.0.0.1:{server.port}")
        verdict, text = checks(kit)["tls"]
    assert verdict == "failed"
    assert f"certificate has expired (valid until {ended:%Y-%m-%d})" in text


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(-400, "failed"), (-200, "ok"), (0, "ok"), (60, "failed")]
)
def test_the_clock_may_be_as_far_off_as_flower_allows(
    seconds: int, verdict: str, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: time.time() + seconds))
    assert checks(kit)["clock"][0] == verdict


#: a changed line of `.env`, the check that fails, and why
FAULTS = {
    "FEDBN_SERVER=127.0.0.1:1": (
        "tls",
        "127.0.0.1:1 cannot be reached: [Errno 111] Connection refused",
    ),
    f"FEDBN_VERSIONS=fedbn-flwr=9.9,flwr={version('flwr')}": (
        "versions",
        "; the federation has fedbn-flwr 9.9",
    ),
    "FEDBN_SERVER=fl.example.org": (
        "tls",
        "FEDBN_SERVER must be HOST:PORT, got 'fl.example.org'",
    ),
    "FEDBN_SERVER=:8443": ("registered", "FEDBN_SERVER must be HOST:PORT, got ':8443'"),
    "FEDBN_SERVER=[::1:8443": ("registered", "InvalidURL: Invalid port: ':1:8443'"),
    "FEDBN_EXCHANGE=fl:": ("exchange", "FEDBN_EXCHANGE must be HOST:PORT, got 'fl:'"),
    "FEDBN_VERSIONS=flwr": ("versions", "; the federation has flwr "),
    "FEDBN_DATA=images": ("data", "FEDBN_DATA must be an absolute path, got 'images'"),
    "FEDBN_DATA=/nowhere/at/all": ("data", "/nowhere/at/all is not a folder that can be read"),
}


@pytest.mark.parametrize("line", FAULTS)
def test_what_is_wrong_in_a_sites_env_is_named(line: str, kit: Path) -> None:
    name, _, value = line.partition("=")
    change(kit, **{name: value})
    check, reason = FAULTS[line]
    verdict, text = checks(kit)[check]
    assert verdict == "failed"
    assert text.endswith(reason)


def test_what_lacks_is_named(kit: Path) -> None:
    change(kit, FEDBN_SERVER="")
    text = (kit / ".env").read_text()
    (kit / ".env").write_text(text.replace("FEDBN_SERVER=\n", ""))
    (kit / "ca.crt").unlink()
    (kit / "south.pub").unlink()
    found = checks(kit)
    assert found["tls"] == ("failed", f"{kit / '.env'} has no 'FEDBN_SERVER'")
    missing = "cannot be read (No such file or directory)"
    assert found["exchange"] == ("failed", f"{kit / 'ca.crt'} {missing}")
    assert found["key"] == ("failed", f"{kit / 'south.pub'} {missing}")


def test_a_public_half_of_another_key(kit: Path) -> None:
    (kit / "node.key").rename(kit / "kept.key")
    assert main(["site", "init", str(kit)]) == 0
    (kit / "kept.key").replace(kit / "node.key")
    assert (
        checks(kit)["key"][1] == f"{kit / 'south.pub'} is not the public half of {kit / 'node.key'}"
    )
    os.chmod(kit / "node.key", 0o640)
    assert checks(kit)["key"] == (
        "failed",
        f"{kit / 'node.key'} can be read by others: chmod 600 {kit / 'node.key'}",
    )


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files to root, and must not read all"
)
def test_data_of_root_are_for_root_to_share_and_not_for_containers_that_run_as_root(
    kit: Path, tmp_path: Path
) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o11)
    (tmp_path / "data").chmod(0o700)
    os.seteuid(4711)
    try:
        with pytest.raises(DeploymentError) as error:
            list(module._data(kit, {"FEDBN_DATA": str(tmp_path / "data")}))
    finally:
        os.seteuid(0)
    assert str(error.value) == (
        f"{tmp_path / 'data'} cannot be read by user 4711:{os.getegid()}, it belongs to 0:0: root "
        "can let this user "
        f"read it, by `chown -R 4711:{os.getegid()}`, or `setfacl -R -m u:4711:rX`"
    )


def test_classes_are_counted(kit: Path, tmp_path: Path) -> None:
    for role, name, count in (
        ("train", "covid", 3),
        ("train", "normal", 2),
        ("test", "covid", 1),
        ("test", "normal", 1),
    ):
        folder = tmp_path / "data" / role / name
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.png").touch()
    change(kit, FEDBN_DATA=str(tmp_path / "data"))
    shown = [(check.verdict, check.text) for check in module.preflight(kit) if check.name == "data"]
    data = tmp_path / "data"
    assert shown == [
        ("ok", f"{data}/train: covid 3, normal 2"),
        ("ok", f"{data}/test: covid 1, normal 1"),
    ]
    (data / "test").rename(data / "val")
    assert checks(kit)["data"] == ("ok", f"{data}/val: covid 1, normal 1")
    (data / "val" / "covid" / "0.png").unlink()
    assert checks(kit)["data"] == ("failed", f"{data}/val: covid 0, normal 1")
    shutil.rmtree(data / "val")
    text = f"folder:{data}: beside train, there is neither test nor val"
    assert checks(kit)["data"] == ("failed", text)
    change(kit, FEDBN_READ="own.module:read")  # which may read anything
    assert checks(kit)["data"] == ("warning", text)


@pytest.mark.parametrize("names", [("Train", "Test"), ()])
def test_data_without_train_and_test_are_refused(
    names: tuple[str, ...], kit: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    for name in names:
        (data / name / "covid").mkdir(parents=True)
    data.mkdir(exist_ok=True)
    change(kit, FEDBN_DATA=str(data))
    there = ", ".join(sorted(names)) or "nothing"
    text = f"there is no {data}/train for train/CLASS/; there is: {there}"
    assert checks(kit)["data"] == ("failed", text)
    change(kit, FEDBN_READ="own.module:read")  # which may read anything
    assert checks(kit)["data"] == ("warning", text)


def test_a_full_disk_is_named(kit: Path) -> None:
    with largest_file(1000):
        assert checks(kit)["folders"] == ("failed", "the disk of log is full: make room")
