"""The SuperLink's requests wait for its database."""

import sys
from pathlib import Path

from tests.helpers.checkout import environment, run


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
    assert run(sys.executable, "-c", code, env=environment()).split() == ["60000", "1"]
