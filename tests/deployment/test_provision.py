"""The folders that `fedbn-flwr provision` and `fedbn-flwr site` make."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

from fedbn_flwr.deployment.cli import main
from fedbn_flwr.deployment.keys import certificate_hosts
from fedbn_flwr.deployment.provision import read_env
from tests.helpers.checkout import ROOT
from tests.helpers.compose import read_compose
from tests.helpers.processes import largest_file

EXAMPLE = ROOT / "federation.example.yaml"
SECRETS = (
    "ca/ca.key",
    "server/server.key",
    "server/superexec.secret",
    "server/operator.conf",
    "operator/operator.key",
    "operator/credentials.yaml",
)
NO_SECRETS = ("ca/ca.crt", "server/server.crt", "sites/north/ca.crt", "sites/north/.env")


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_secrets_lie_in_folders_of_their_owners_only(out: Path) -> None:
    assert len((out / "server" / "superexec.secret").read_bytes()) == 32
    for folder in ("ca", "server", "server/state", "operator", "sites/north"):
        assert (out / folder).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("before", "of_others"),
    [
        ("os.umask(0)", {0o644}),
        ("os.umask(0o077)", {0o644}),
        # as files are before their modes are set
        ("os.umask(0); os.fchmod = lambda *_: None", {0o644, 0o666}),
    ],
)
def test_no_secret_can_ever_be_read_by_others_and_all_else_can(
    before: str, of_others: set[int], tmp_path: Path
) -> None:
    code = f"""import os; {before}
from fedbn_flwr.deployment.cli import main
main(["provision", {str(EXAMPLE)!r}, "--out", {str(tmp_path)!r}])"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in (*SECRETS, *NO_SECRETS)}
    assert {modes[name] for name in SECRETS} == {0o600}
    assert {modes[name] for name in NO_SECRETS} <= of_others


def test_the_servers_certificate_is_for_its_names_and_the_loopback(out: Path) -> None:
    hosts = certificate_hosts(out / "server" / "server.crt")
    assert hosts == {"fl.example.org", "10.0.0.5", "superlink", "proxy", "localhost", "127.0.0.1"}
    context = ssl.create_default_context(cafile=out / "sites" / "north" / "ca.crt")
    context.load_cert_chain(out / "server" / "server.crt", out / "server" / "server.key")


def test_the_ca_signs_the_server_and_cannot_make_further_cas(out: Path) -> None:
    ca, server = (
        x509.load_pem_x509_certificate((out / name).read_bytes())
        for name in ("ca/ca.crt", "server/server.crt")
    )
    server.verify_directly_issued_by(ca)
    limits = [
        item.extensions.get_extension_for_class(x509.BasicConstraints).value
        for item in (ca, server)
    ]
    assert [(limit.ca, limit.path_length) for limit in limits] == [(True, 0), (False, None)]
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 365


def test_only_the_operators_door_knows_the_operators_key(out: Path) -> None:
    key = (out / "operator" / "operator.key").read_bytes().strip()
    assert len(key) == 64
    holders = {name for name, content in files(out).items() if key in content}
    assert holders == {"operator/operator.key", "server/operator.conf"}


def test_no_kit_holds_a_private_key_or_secret(out: Path) -> None:
    for kit in (out / "sites").iterdir():
        assert {path.name for path in kit.iterdir()} == {
            ".env",
            "ca.crt",
            "docker-compose.yml",
            "state",
            "models",
            "log",
            "code",
            "weights",
            "fedbn-node.service",
            "fedbn-exec.service",
        }
        assert not [
            path for path in kit.iterdir() if path.is_file() and b"PRIVATE" in path.read_bytes()
        ]


def test_sites_have_numbers_and_fill_in_one_line(out: Path) -> None:
    kits = [read_env(out / "sites" / site) for site in ("north", "south", "west")]
    assert [kit["FEDBN_PARTITION"] for kit in kits] == ["0", "1", "2"]
    assert {kit["FEDBN_SITES"] for kit in kits} == {"3"}
    assert [key for key, value in kits[0].items() if not value] == ["FEDBN_DATA"]


def test_a_site_that_is_added_gets_the_next_number_and_the_others_stay(
    out: Path, tmp_path: Path
) -> None:
    before = files(out)
    assert main(["provision", str(EXAMPLE), "--out", str(out)]) == 0
    assert files(out) == before
    content = yaml.safe_load(EXAMPLE.read_text())
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump({**content, "sites": [*content["sites"], "east"]}))
    assert main(["provision", str(more), "--out", str(out)]) == 0
    after = files(out)
    assert {name: after[name] for name in before if name != "numbers.json"} == {
        name: content for name, content in before.items() if name != "numbers.json"
    }
    assert read_env(out / "sites" / "east")["FEDBN_PARTITION"] == "3"
    # and while the CA is offline
    shutil.rmtree(out / "ca")
    more.write_text(yaml.safe_dump({**content, "sites": [*content["sites"], "east", "more"]}))
    assert main(["provision", str(more), "--out", str(out)]) == 0
    assert (out / "sites/more/ca.crt").read_bytes() == (out / "server/ca.crt").read_bytes()
    assert not (out / "ca/ca.key").exists()


def remake(out: Path, lacking: str, shown: str) -> None:
    """Delete what an error says."""
    (named,) = re.findall(
        rf"the server lacks {re.escape(lacking)}: delete (.*) in {out}, and run this again", shown
    )
    for name in named.split(", "):
        (out / name).unlink()


def test_a_changed_port_is_refused_then_carried_out_and_old_kits_are_named(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, other = files(out), tmp_path / "other.yaml"
    other.write_text(EXAMPLE.read_text().replace("port: 8443", "port: 9443"))
    assert main(["provision", str(other), "--out", str(out)]) == 2
    assert {
        name: content for name, content in files(out).items() if before.get(name) != content
    } == {}
    remake(out, "FEDBN_PORT=9443", capsys.readouterr().err)
    assert main(["provision", str(other), "--out", str(out)]) == 0
    assert "listen 9443 ssl" in (out / "server" / "nginx.conf").read_text()
    assert read_env(out / "server")["FEDBN_PORT"] == "9443"
    lines = [line for line in capsys.readouterr().out.splitlines() if "out of date" in line]
    wanted = "FEDBN_SERVER=fl.example.org:9443 FEDBN_PORT=9443"
    assert lines == [
        f"the kit of {site} is out of date; its .env, here and at the site, needs {wanted}"
        for site in ("north", "south", "west")
    ]
    # a kit that has these lines is no more out of date, whatever the site's own lines are
    env = out / "sites" / "west" / ".env"
    text = env.read_text().replace("8443", "9443").replace("FEDBN_DATA=", "FEDBN_DATA=/images")
    env.write_text(text + "FEDBN_USER=7:7\n")
    assert main(["provision", str(other), "--out", str(out)]) == 0
    assert "the kit of west" not in capsys.readouterr().out


def test_numbers_belong_to_names_and_are_never_given_again(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def numbers(*sites: str) -> dict[str, str]:
        file = tmp_path / "other.yaml"
        file.write_text(
            yaml.safe_dump({**yaml.safe_load(EXAMPLE.read_text()), "sites": list(sites)})
        )
        assert main(["provision", str(file), "--out", str(out)]) == 0
        return {site: read_env(out / "sites" / site)["FEDBN_PARTITION"] for site in sites}

    capsys.readouterr()
    assert numbers("south", "west", "east") == {"south": "1", "west": "2", "east": "3"}
    assert read_env(out / "sites" / "east")["FEDBN_SITES"] == "4"
    # to split data of a run, sites must know how many numbers there are
    assert (
        "the kit of south is out of date; its .env, here and at the site, needs FEDBN_SITES=4\n"
        in (capsys.readouterr().out)
    )
    shutil.rmtree(out / "sites" / "east")
    assert numbers("more", "north") == {"more": "4", "north": "0"}


def test_another_server_needs_another_certificate_and_that_the_cas_key(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(EXAMPLE.read_text().replace("fl.example.org", "elsewhere.example.org"))
    assert main(["provision", str(other), "--out", str(out)]) == 2
    assert (
        "certificate is not for elsewhere.example.org: delete server.crt" in capsys.readouterr().err
    )
    for name in ("server.crt", "server.key"):
        (out / "server" / name).unlink()
    (out / "ca" / "ca.key").rename(out / "elsewhere.key")
    before = files(out)
    assert main(["provision", str(other), "--out", str(out)]) == 2
    assert "put the CA's key back" in capsys.readouterr().err
    assert files(out) == before
    (out / "elsewhere.key").rename(out / "ca" / "ca.key")
    assert main(["provision", str(other), "--out", str(out)]) == 2
    remake(out, "FEDBN_EXCHANGE=elsewhere.example.org:8445", capsys.readouterr().err)
    assert main(["provision", str(other), "--out", str(out)]) == 0
    assert "elsewhere.example.org" in certificate_hosts(out / "server" / "server.crt")


def is_pair(kit: Path) -> bool:
    public = load_ssh_public_key((kit / "south.pub").read_bytes())
    assert uses_nist_ec_curve(public)  # type: ignore[arg-type]  # that is the question
    return (
        load_ssh_private_key((kit / "node.key").read_bytes(), password=None).public_key() == public
    )


def test_a_sites_key_stays_until_it_is_gone_and_flower_takes_it(out: Path) -> None:
    kit = out / "sites" / "south"
    assert main(["site", "init", str(kit)]) == 0
    assert (kit / "node.key").stat().st_mode & 0o777 == 0o600
    assert (kit / "superexec.secret").stat().st_mode & 0o777 == 0o600
    assert (kit / "superexec.secret").read_bytes() != (
        out / "server" / "superexec.secret"
    ).read_bytes()
    assert is_pair(kit)
    first = (kit / "node.key").read_bytes()
    assert main(["site", "init", str(kit)]) == 0
    assert (kit / "node.key").read_bytes() == first
    (kit / "node.key").unlink()
    assert main(["site", "init", str(kit)]) == 0
    assert (kit / "node.key").read_bytes() != first
    assert is_pair(kit)
    assert (kit / ".env").read_text().count("FEDBN_USER=") == 1


def test_no_two_projects_of_a_machine_have_a_container_of_one_name(tmp_path: Path) -> None:
    names: list[str] = []
    for name in ("hospitals", "banks"):
        file, out = tmp_path / f"{name}.yaml", tmp_path / name
        file.write_text(f"name: {name}\nserver: fl.example.org\nsites: [north, server, all]\n")
        assert main(["provision", str(file), "--out", str(out)]) == 0
        for folder in (out, out / "server", *(out / "sites").iterdir()):
            env = read_env(folder)
            names += [
                f"{env['COMPOSE_PROJECT_NAME']}-{key}"
                for key in read_compose(env["COMPOSE_PROFILES"], env)
            ]
    assert len(set(names)) == len(names)


def test_services_do_not_run_as_root(out: Path) -> None:
    assert main(["site", "init", str(out / "sites" / "west")]) == 0
    users = {
        read_env(folder)["FEDBN_USER"] for folder in (out, out / "server", out / "sites" / "west")
    }
    owner = (out / "server" / "server.key").stat()
    assert users == {f"{owner.st_uid}:{owner.st_gid}"}
    assert owner.st_uid != 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("provision", "nowhere.yaml", "--out", "x"),
            "nowhere.yaml cannot be read (No such file or directory)",
        ),
        (("provision", "nowhere.yaml"), "the following arguments are required: --out"),
        (
            ("site", "init", "nowhere"),
            "nowhere/.env cannot be read (No such file or directory): is nowhere the kit",
        ),
        (
            ("site", "register", "x.pub", "--operator", "nowhere"),
            "is nowhere an operator's folder?",
        ),
        (("preflight", "nowhere"), "is nowhere the kit of a site?"),
        (("site", "forget"), "invalid choice: 'forget'"),
    ],
)
def test_errors_are_one_line(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert reason in shown
    assert shown.startswith("fedbn-flwr: ")
    assert shown.count("\n") == 1


PROVISION = ("provision", str(EXAMPLE), "--out", "{out}")
STATUS = ("status", "--operator", "{out}/operator")


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("operator/sites.json", ("site", "revoke", "north", "--operator", "{out}/operator")),
        ("operator/config.toml", STATUS),
        ("operator/operator.key", STATUS),
        ("operator/ca.crt", STATUS),
        ("operator/operator.key", PROVISION),
        ("numbers.json", PROVISION),
        ("server/server.crt", PROVISION),
        ("server/.env", PROVISION),
        ("sites/north/.env", PROVISION),
        ("sites/north/.env", ("site", "init", "{out}/sites/north")),
        ("sites/north/.env", ("preflight", "{out}/sites/north")),
    ],
)
def test_a_damaged_file_is_named(
    damaged: str, words: Sequence[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b"{\xff = [\n"
    (out / damaged).write_bytes(content)
    assert main([word.format(out=out) for word in words]) == 2
    shown = capsys.readouterr().err
    assert f"{damaged} is damaged, or another file (" in shown
    assert shown.count("\n") == 1
    assert (out / damaged).read_bytes() == content


def test_a_certificate_is_made_with_the_key_of_its_ca_only(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["provision", str(EXAMPLE), "--out", str(tmp_path / "other")]) == 0
    for name in ("server.crt", "server.key"):
        (out / "server" / name).unlink()
    words = ("provision", str(EXAMPLE), "--out", str(out))
    shutil.copy(tmp_path / "other" / "ca" / "ca.key", out / "ca" / "ca.key")
    assert main(words) == 2
    assert f"ca.key is not the key of {out / 'ca' / 'ca.crt'}" in capsys.readouterr().err
    (out / "ca" / "ca.key").write_text("no key\n")
    assert main(words) == 2
    assert "ca.key is damaged, or another file (" in capsys.readouterr().err
    assert not (out / "server" / "server.crt").exists()


def test_numbers_stay_where_the_disk_is_full(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = out / "numbers.json"
    before = path.read_bytes()
    more = tmp_path / "more.yaml"
    more.write_text(EXAMPLE.read_text().replace("[north, south, west]", "[east, north, west]"))
    words = ("provision", str(more), "--out", str(out))
    with largest_file(2):
        assert main(words) == 1
    shown = capsys.readouterr().err
    assert shown == "fedbn-flwr: [Errno 27] File too large\n"
    assert path.read_bytes() == before
    assert main(words) == 0
    assert json.loads(path.read_bytes())["east"] == 3


@pytest.mark.parametrize("user", ["me", "1000", "1000:", "-1:0"])
def test_a_user_that_is_no_number(
    user: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("FEDBN_USER", user)
    assert main(["site", "init", str(out / "sites" / "west")]) == 2
    assert f"FEDBN_USER must be two numbers, USER:GROUP, got {user!r}" in capsys.readouterr().err


def test_other_commands_are_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert " fixbn " in capsys.readouterr().out
    assert main(["nonsense"]) == 2
    shown = capsys.readouterr().err
    assert " compare," in shown
    assert " provision," in shown
