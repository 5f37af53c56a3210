"""Flower's SuperExec of a site, which forks each ClientApp from a process that has imported PyTorch already.

Takes the arguments of `flower-superexec`. Flower starts a process for every message of a site, and each of them imports
PyTorch for seconds before it trains. Here Python's fork server imports once what all ClientApps import, and forks for
every message. The forked process runs Flower's own command `flwr-clientapp` with its own token, which the fork server
never sees, and with the app's own modules. `FEDBN_WARM=0` lets Flower start each ClientApp.
"""

import os
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

#: 0 turns the fork server off
VARIABLE = "FEDBN_WARM"
_CLIENTAPP = "flwr-clientapp"
#: what every ClientApp imports; none of it may start a thread. Not `fedbn_flwr`: an app brings its own
_IMPORTED = ["flwr.supernode.cli.flwr_clientapp", "torch", "safetensors.torch"]


def main() -> None:
    """Run a SuperExec until it is told to end."""
    if os.environ.get(VARIABLE, "1") != "0":
        from fedbn_flwr.deployment.flower_internals import start_processes

        forkserver.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
        start_processes(_start)
    (command,) = entry_points(group="console_scripts", name="flower-superexec")
    command.load()()


def _start(words: list[str], **streams: Any) -> None:
    """Stand for `subprocess.Popen` where Flower starts processes, and fork ClientApps."""
    if words[0] == _CLIENTAPP:
        # the command line is in a pipe, which only the new process reads
        get_context("forkserver").Process(target=_run, args=(words,)).start()
    else:
        subprocess.Popen(words, **streams)


def _run(words: list[str]) -> None:
    """Run a ClientApp in a forked process, as one that Flower has started."""
    # Python waits at its end for the process that it knows, and nobody for the one that trains
    if os.fork():
        return
    command = shutil.which(words[0])
    assert command is not None, f"{words[0]} is not on PATH"
    sys.argv, sys.path[0] = words, str(Path(command).parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedbn_flwr"]:
        del sys.modules[name]
    # an app may draw from it without a seed
    sys.modules["numpy"].random.seed()
    runpy.run_path(command, run_name="__main__")


if __name__ == "__main__":
    main()
