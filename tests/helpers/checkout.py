"""A copy of the project as in a fresh clone, and programs that run in it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: where the console commands of this environment are
BIN = Path(sys.executable).parent


def copy_checkout(target: Path) -> Path:
    """Copy the files that git tracks or would track, and return the copy.

    `target` must have no underscore in its name, which Flower refuses.
    """
    listed = run(
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a program to its end and return what it printed.

    Any failure fails the test, with all that it printed.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without Python's paths to the checkout, and with
    `changes`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept['PATH']}", **changes}
