"""Flower's servers, wrapped: a ClientApp is forked with PyTorch imported, and the SuperLink waits for its database."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkout import ROOT, environment, run
from tests.helpers.waiting import PATIENCE


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


#: stands for Flower's SuperExec, which starts two ClientApps
CODE = """
import os, signal, time
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from fedbn_flwr.deployment import superexec

def flower_superexec():
    from flwr.supercore.superexec.executor import subprocess_executor
    if {kill}:
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        os.waitid(os.P_PID, forkserver._forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)
    for number in range(2):
        spec = SimpleNamespace(task_type=subprocess_executor.TaskType.CLIENT_APP, runtime_api_address="node:9094",
            token=f"secret-{{number}}", insecure=True, root_certificates_path=None, parent_pid=os.getpid(),
            runtime_dependency_install=False, suppress_output=False)
        subprocess_executor.SubprocessExecutor().launch(spec)
    while len(list(Path({folder!r}).glob("*.json"))) < 2:
        time.sleep(0.05)

superexec.entry_points = lambda group, name: [SimpleNamespace(load=lambda: flower_superexec)]
superexec.main()
"""

#: stands for Flower's ClientApp, which says what it is
CLIENTAPP = """#!{python}
import json, os, sys
from pathlib import Path
there = list(sys.modules)
own = [name for name in there if name.startswith("fedbn_flwr")]
import numpy
shown = "".join(Path("/proc", str(process), "cmdline").read_text() for process in (os.getpid(), os.getppid()))
row = dict(words=sys.argv, process=os.getpid(), torch="torch" in there, own=own, shown=shown, drawn=numpy.random.rand(),
    path=sys.path[0])
part = Path({folder!r}, str(os.getpid()))
part.write_text(json.dumps(row))
part.rename(str(part) + ".json")
"""


def clientapps(folder: Path, kill: bool = False, **variables: str) -> list[dict[str, Any]]:
    """What two ClientApps say of themselves, in the order of their tokens."""
    (folder / "bin").mkdir()
    command = folder / "bin" / "flwr-clientapp"
    command.write_text(CLIENTAPP.format(python=sys.executable, folder=str(folder)))
    command.chmod(0o755)
    env = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
    env["PATH"] = f"{folder / 'bin'}:{env['PATH']}"
    code = CODE.format(folder=str(folder), kill=kill)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(rows, key=lambda row: str(row["words"][1:]))


@pytest.mark.parametrize("kill", [False, True])
def test_each_clientapp_is_a_process_of_its_own_with_its_own_token(kill: bool, tmp_path: Path) -> None:
    rows = clientapps(tmp_path, kill)
    assert [row["words"][1:5] for row in rows] == [
        ["--runtime-api-address", "node:9094", "--token", f"secret-{number}"] for number in range(2)
    ]
    first, other = rows
    assert first["process"] != other["process"]
    for row in rows:
        # it came with PyTorch, and finds the modules of its app as if they were imported for the first time
        assert row["torch"]
        assert row["own"] == []
        assert row["path"] == str(tmp_path / "bin")
        # the process list of the machine shows no token
        assert row["words"][4] not in row["shown"]
    assert first["drawn"] != other["drawn"]


def test_flower_can_start_each_clientapp(tmp_path: Path) -> None:
    rows = clientapps(tmp_path, FEDBN_WARM="0")
    assert [row["words"][4] for row in rows] == ["secret-0", "secret-1"]
    assert not any(row["torch"] for row in rows)
