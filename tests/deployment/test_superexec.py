"""Flower's servers, wrapped: a ClientApp is forked with PyTorch imported, and the SuperLink waits
for its database.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkout import ROOT, environment, run
from tests.helpers.waiting import PATIENCE


@pytest.mark.slow
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


#: stands for Flower's two commands: a SuperExec that starts two ClientApps, which say what they are
CODE = """
import json, os, select, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from fedbn_flwr.deployment import superexec

folder = Path({folder!r})

def flower_superexec():
    from flwr.supercore.superexec.executor import subprocess_executor
    if {warm}:
        select.select([subprocess_executor.subprocess.Popen._warm], [], [])
    if {kill}:
        (warm,) = Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split()
        os.kill(int(warm), signal.SIGKILL)
        os.waitpid(int(warm), 0)
    for number in range(2):
        spec = SimpleNamespace(task_type=subprocess_executor.TaskType.CLIENT_APP, runtime_api_address="node:9094",
            token=f"secret-{{number}}", insecure=True, root_certificates_path=None, parent_pid=os.getpid(),
            runtime_dependency_install=False, suppress_output=False)
        subprocess_executor.SubprocessExecutor().launch(spec)
    while len(list(folder.glob("*.json"))) < 2:
        time.sleep(0.05)

def flower_clientapp():
    import numpy
    shown = Path("/proc", str(os.getppid()), "cmdline").read_text()
    own = [name for name in sys.modules if name.startswith("fedbn_flwr")]
    row = dict(words=sys.argv, process=os.getpid(), parent=os.getppid(), torch="torch" in sys.modules, own=own,
        shown=Path("/proc/self/cmdline").read_text() + shown, drawn=numpy.random.rand(), path=sys.path[0])
    part = folder / str(os.getpid())
    part.write_text(json.dumps(row))
    part.rename(f"{{part}}.json")

commands = {{"flower-superexec": flower_superexec, "flwr-clientapp": flower_clientapp}}
if {kill}:
    superexec._IMPORTED = ("numpy",)
superexec.entry_points = lambda group, name: [SimpleNamespace(load=lambda: commands[name])]
superexec.main()
"""


def clientapps(
    folder: Path, kill: bool = False, **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """What two ClientApps say of themselves, in the order of their tokens, and what was printed."""
    # beside it, what Flower itself would start
    (folder / "bin").mkdir()
    command = folder / "bin" / "flwr-clientapp"
    code = f"import json, os, sys; from pathlib import Path; row = dict(words=sys.argv, torch='torch' in sys.modules); \
part = Path({str(folder)!r}, str(os.getpid())); part.write_text(json.dumps(row)); part.rename(str(part) + '.json')"
    command.write_text(f"#!{sys.executable}\n{code}\n")
    command.chmod(0o755)
    env = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
    env["PATH"] = f"{folder / 'bin'}:{env['PATH']}"
    code = CODE.format(folder=str(folder), kill=kill, warm="FEDBN_WARM" not in variables)
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
    return sorted(rows, key=lambda row: str(row["words"])), done.stderr


@pytest.mark.slow
def test_each_clientapp_is_a_process_of_its_own_with_its_own_token(tmp_path: Path) -> None:
    rows, _ = clientapps(tmp_path)
    assert [row["words"][:5] for row in rows] == [
        ["flwr-clientapp", "--runtime-api-address", "node:9094", "--token", f"secret-{number}"]
        for number in range(2)
    ]
    first, other = rows
    assert first["process"] != other["process"]
    assert first["parent"] == other["parent"]
    for row in rows:
        # it came with PyTorch, and finds the modules of its app as if they were imported for the
        # first time
        assert row["torch"]
        assert row["own"] == []
        assert row["path"] == str(Path(sys.executable).parent)
        # the process list of the machine shows no token
        assert row["words"][4] not in row["shown"]
    assert first["drawn"] != other["drawn"]


@pytest.mark.parametrize(("kill", "variables"), [(False, {"FEDBN_WARM": "0"}), (True, {})])
def test_without_a_warm_process_flower_starts_each_clientapp(
    kill: bool, variables: dict[str, str], tmp_path: Path
) -> None:
    rows, printed = clientapps(tmp_path, kill, **variables)
    assert [row["words"][4] for row in rows] == ["secret-0", "secret-1"]
    assert not any(row["torch"] for row in rows)
    assert printed.count("the warm process is gone") == int(kill)
