"""The operator's commands, against a server that answers from a table, and a Flower command that
does.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.cli.utils import load_cli_auth_plugin_from_connection
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

from fedbn_flwr.deployment.cli import main
from fedbn_flwr.deployment.operator import Operator
from tests.helpers.tls_server import TLSServer

RUN = "7041"
FILES = {"summary.json": b"{}", "model.safetensors": b"\0\1\2"}
ROUNDS = (
    b'{"round": 1, "nodes": 3, "train-loss": 2.25}\n'
    b'{"round": 2, "nodes": 2, "train-loss": 2.0, "left-out": ["west"]}\n{"round": 3, "no'
)
REVOKED = {
    "node-id": "13",
    "status": "unregistered",
    "online-at": "today",
    "deleted-at": "yesterday",
}
CONFIG = json.dumps({"options": {"method": "fixbn", "rounds": 5}}).encode()


def listing(**kinds: str) -> bytes:
    return json.dumps([{"name": name, "type": kind} for name, kind in kinds.items()]).encode()


@pytest.fixture
def federation(out: Path) -> Iterator[Path]:
    """A provisioned federation with a server that has the results of one run, and of one that is
    being written.
    """
    entries = dict.fromkeys((*FILES, "config.json", "rounds.jsonl", "summary.json.partial"), "file")
    pages = {f"/results/{RUN}/{name}": content for name, content in FILES.items()}
    pages |= {f"/results/{RUN}/config.json": CONFIG, f"/results/{RUN}/rounds.jsonl": ROUNDS}
    pages |= {f"/results/{RUN}/": listing(**entries), "/results/": listing(**{RUN: "directory"})}
    config = out / "operator" / "config.toml"
    with TLSServer(
        out / "server", pages, (config.parent / "operator.key").read_text().strip()
    ) as server:
        config.write_text(config.read_text().replace(":8444", f":{server.port}"))
        yield out


def test_results_are_fetched_as_they_are(federation: Path, tmp_path: Path) -> None:
    words = [
        "fetch",
        RUN,
        "--operator",
        str(federation / "operator"),
        "--out",
        str(tmp_path / "here"),
    ]
    assert main(words) == 0
    fetched = {path.name: path.read_bytes() for path in (tmp_path / "here" / RUN).iterdir()}
    assert fetched == {**FILES, "config.json": CONFIG, "rounds.jsonl": ROUNDS}


@pytest.mark.parametrize("run", ["12", "../7041", "x"])
def test_a_run_without_results(
    run: str, federation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", run, "--operator", str(federation / "operator")]) == 2
    assert f"there are no results of run {run!r}; there are: {RUN}" in capsys.readouterr().err


def test_a_server_that_names_files_elsewhere_writes_only_into_the_runs_folder(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Operator,
        "result",
        lambda _, path: listing(**{"../../evil": "file"}) if path.endswith("/") else b"x",
    )
    assert Operator(federation / "operator").fetch(RUN, tmp_path / "here") == [
        tmp_path / "here" / RUN / "evil"
    ]


def test_pages_of_another_server_and_damaged_results(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Operator, "result", lambda *_: b"<html>")
    operator = Operator(federation / "operator")
    assert main(["fetch", RUN, "--operator", str(operator.home)]) == 2
    shown = capsys.readouterr().err
    assert f"results/{RUN} is damaged, or another file (JSONDecodeError: " in shown
    assert shown.endswith(f", as https://{operator.address} shows it\n")
    assert operator.progress(RUN) == {}


def test_status_is_a_line_a_site_and_a_run(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"pending-at": "Monday", "finished-at": "N/A"}
    reason = "ServerApp failed with exception: west (node 12): its images are gone"
    failed = {"run-id": "12", "status": "finished:failed", "status-details": reason}
    answers = {
        "supernode": {
            "nodes": [{"node-id": "11", "status": "online", "online-at": "today"}, REVOKED]
        },
        "list": {
            "runs": [
                {"run-id": RUN, "status": "running", "status-details": "N/A", **started},
                {**failed, **started},
            ]
        },
    }
    monkeypatch.setattr(Operator, "flower", lambda _, *words: answers[words[0]])
    (federation / "operator" / "sites.json").write_text(
        '{"north": "11", "south": "12", "west (revoked, 13)": "13"}'
    )
    assert main(["status", "--operator", str(federation / "operator")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["north", "11", "online", "today"] in lines
    assert ["south", "12", "unknown", "to", "the", "server"] in lines
    assert ["west", "(revoked,", "13)", "13", "unregistered", "yesterday"] in lines
    at = lines.index(
        [RUN, "running", "fixbn", "2/5", "nodes", "2,", "train-loss", "2,", "without", "west"]
    )
    assert [" ".join(line) for line in lines[at + 1 : at + 4]] == [
        "from Monday",
        "12 finished:failed",
        "from Monday: west (node 12): its images are gone",
    ]


def test_sites_are_registered_by_the_name_of_their_key_and_revoked_by_it(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def flower(_: Operator, *words: str) -> dict[str, int]:
        asked.append(words)
        return {"node-id": 11}

    monkeypatch.setattr(Operator, "flower", flower)
    kit, home = federation / "sites" / "north", ["--operator", str(federation / "operator")]
    assert main(["site", "init", str(kit)]) == 0
    assert main(["site", "register", str(kit / "node.key"), *home]) == 2
    assert "is a private key, which must not leave its site" in capsys.readouterr().err
    strange = kit / "north\n\x1b[31m.pub"
    strange.write_bytes((kit / "north.pub").read_bytes())
    assert main(["site", "register", str(strange), *home]) == 2
    assert (
        r"site 'north\n\x1b[31m' must be lower-case letters, digits and hyphens"
        in capsys.readouterr().err
    )
    key = str(kit / "north.pub")
    assert main(["site", "register", key, *home]) == 0
    assert main(["site", "register", key, *home]) == 2
    assert "site 'north' is registered already" in capsys.readouterr().err
    assert main(["site", "revoke", "south", *home]) == 2
    assert "no site 'south' is registered; there are: north" in capsys.readouterr().err
    assert main(["site", "revoke", "north", *home]) == 0
    assert asked[:2] == [
        ("supernode", "register", key, "hospitals", "--name", "north"),
        ("supernode", "unregister", "11", "hospitals"),
    ]
    # its node is still known by name, and a new key can be registered
    assert Operator(federation / "operator").sites() == {"north (revoked, 11)": "11"}
    assert main(["site", "revoke", "north", *home]) == 2
    assert main(["site", "register", key, *home]) == 0


def test_without_the_operators_key_nobody_is_answered(
    federation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (federation / "operator" / "operator.key").write_text("another\n")
    assert main(["fetch", RUN, "--operator", str(federation / "operator")]) == 2
    assert capsys.readouterr().err.endswith(f"/results/{RUN}/: Unauthorized\n")
    (federation / "operator" / "operator.key").unlink()
    assert main(["status", "--operator", str(federation / "operator")]) == 2
    assert "operator.key cannot be read" in capsys.readouterr().err


def test_flowers_own_command_sends_the_operators_key(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = Operator(federation / "operator")
    store = FileCredentialStore(operator.home / "credentials.yaml")
    assert store.file_path.stat().st_mode & 0o777 == 0o600
    for module in ("flwr.cli.utils", "flwr.cli.auth_plugin.oidc_cli_plugin"):
        monkeypatch.setattr(f"{module}.get_credential_store", lambda: store)
    plugin = load_cli_auth_plugin_from_connection(operator.address)
    plugin.load_tokens()
    key = (operator.home / "operator.key").read_text().strip()
    assert (ACCESS_TOKEN_KEY, key) in plugin.write_tokens_to_metadata([])


def test_an_operators_folder_can_move(federation: Path, tmp_path: Path) -> None:
    moved = (federation / "operator").rename(tmp_path / "elsewhere")
    operator = Operator(moved)
    assert f'root-certificates = "{moved / "ca.crt"}"' in (moved / "config.toml").read_text()
    assert operator.result(f"{RUN}/summary.json") == b"{}"


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.sampled(1)
def test_what_flower_refuses_is_one_line(
    beside: bool,
    federation: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # on Debian, Python is /usr/bin/python3 and pip installs commands into /usr/local/bin
    interpreter = tmp_path / "bin" / "python3"
    interpreter.parent.mkdir()
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", sys.executable if beside else str(interpreter))
    # the server of this test has no Control API
    assert main(["status", "--operator", str(federation / "operator")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fedbn-flwr: `flwr supernode list` at 127.0.0.1:")
    assert shown.count("\n") == 1
