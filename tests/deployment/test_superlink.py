"""The SuperLink's requests wait for its database."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.checkout import ROOT, environment


def test_every_connection_to_the_database_waits_a_minute(tmp_path: Path) -> None:
    code = f"""from fedbn_flwr.deployment import superlink
from flwr.server.superlink.linkstate import SqlLinkState
from sqlalchemy import text
from unittest.mock import Mock
def flower_superlink():
    state = SqlLinkState({str(tmp_path / "superlink.db")!r}, Mock(), Mock())
    state.initialize()
    with state.session() as session:
        print(*(session.execute(text(f"PRAGMA {{name}}")).scalar() for name in ("busy_timeout", "foreign_keys")))
class Command:
    def load(self): return flower_superlink
superlink.entry_points = lambda **_: [Command()]
superlink.main()"""
    assert _output("-c", code).split() == ["60000", "1"]


def test_flowers_own_command_is_the_one_that_is_run() -> None:
    assert "Start a Flower SuperLink" in _output("-m", "fedbn_flwr.deployment.superlink", "--help")


def _output(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
