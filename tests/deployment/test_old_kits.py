"""Kits and ClientApps that once asked for secure sums: without them they do not start, and say what would leave."""

import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.clientapp.bn_client_app import NodeApp
from fedbn_flwr.deployment.cli import main
from fedbn_flwr.deployment.site import read_env
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import ROOT, environment
from tests.helpers.compose import read_compose

VARIABLES = ("FEDBN_SECURE", "FEDBN_SECURE_MIN", "FEDBN_FLWR_SECURE_SITE", "FEDBN_FLWR_SECURE_MIN")
GONE = "is set, but secure sums are gone: the server would see this site's model, metrics and counts as they are"


@pytest.fixture
def kit(out: Path) -> Path:
    """An old kit, with its files for sums."""
    kit = out / "sites" / "north"
    (kit / "secure").mkdir()
    (kit / "secure" / "sites.txt").write_text("the others' keys\n")
    return kit


@pytest.mark.parametrize("line", ["FEDBN_SECURE=1", "FEDBN_SECURE_MIN=5"])
@pytest.mark.parametrize("command", [("site", "init"), ("preflight",)])
def test_a_kit_that_asks_for_sums_is_refused_in_one_line(
    command: tuple[str, ...], line: str, kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (kit / ".env").open("a") as file:
        file.write(f"{line}\n")
    capsys.readouterr()
    assert main([*command, str(kit)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"fedbn-flwr: {line.partition('=')[0]} {GONE}")
    assert shown.err.count("\n") == 1
    assert not (kit / "node.key").exists()
    assert (kit / "secure" / "sites.txt").read_text() == "the others' keys\n"


@pytest.mark.parametrize("profile", ["site", "all"])
def test_the_supernode_of_a_kit_that_asks_for_sums_does_not_start(profile: str, kit: Path) -> None:
    env = {**read_env(kit), "FEDBN_SECURE": "1"}
    service = read_compose(profile, env)["node" if profile == "site" else "north"]
    words = (sys.executable, "-m", "fedbn_flwr.deployment.supernode")
    given = {name: value for name, value in service.environment.items() if name != "FEDBN_SITE_LOG"}
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment(**given))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"the SuperNode does not start: FEDBN_SECURE {GONE}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", VARIABLES)
def test_a_clientapp_of_a_site_that_asks_for_sums_answers_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, app = list[Message](), NodeApp()

    @app.train()
    def train(message: Message, _: object) -> Message:
        seen.append(message)
        return Message(RecordDict(), reply_to=message)

    def ask(app: ClientApp) -> Message:
        grid = InProcessGrid(app, 1)
        (reply,) = grid.send_and_receive([Message(RecordDict(), 1000, MessageType.TRAIN)])
        return reply

    monkeypatch.setenv(name, "")
    assert not ask(app).has_error()
    monkeypatch.setenv(name, "3")
    assert str(ask(app).error.reason).startswith(f"{name} {GONE}")
    assert len(seen) == 1
