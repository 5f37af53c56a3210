"""Flower's SuperExec of a site, which forks each ClientApp from a process that has imported PyTorch
already.

Takes the arguments of `flower-superexec`. Flower starts a process for every message of a site, and
each of them imports PyTorch for seconds before it trains. Here a second process, the warm one,
imports once what all ClientApps import, and forks for every message. The forked process runs
Flower's own command `flwr-clientapp` with its own token, which the warm process never sees, and
with the app's own modules. `FEDBN_WARM=0` lets Flower start each ClientApp.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

#: 0 turns the warm process off
VARIABLE = "FEDBN_WARM"
_CLIENTAPP = "flwr-clientapp"
#: what the warm process says when it has imported everything
_READY = b"ready"
#: what every ClientApp imports; none of it may start a thread. Not `fedbn_flwr`: an app brings its
#: own
_IMPORTED = ("flwr.supernode.cli.flwr_clientapp", "torch", "safetensors.torch")


def main() -> None:
    """Run a SuperExec until it is told to end."""
    command = "flower-superexec"
    if os.environ.get(VARIABLE, "1") != "0":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # before anything else is imported or any thread is started
        if os.fork() == 0:
            ours.close()
            sys.argv = _fork_clientapps(theirs)
            command = _CLIENTAPP
        else:
            theirs.close()
            from fedbn_flwr.deployment.flower_internals import start_processes

            start_processes(_Start(ours))
    (found,) = entry_points(group="console_scripts", name=command)
    found.load()()


class _Start:
    """Stands for `subprocess.Popen` where Flower starts processes, and lets the warm process fork
    ClientApps.
    """

    def __init__(self, warm: socket.socket) -> None:
        self._warm: socket.socket | None = warm
        self._ready = False

    def __call__(self, words: list[str], **streams: Any) -> None:
        if words[0] != _CLIENTAPP or not self._fork(words):
            subprocess.Popen(words, **streams)

    def _fork(self, words: list[str]) -> bool:
        """Return whether the warm process took the command line; it is in a pipe, which only the
        new process reads.
        """
        try:
            if self._warm is None or not self._is_ready(self._warm):
                return False
            reader, writer = os.pipe()
            with os.fdopen(reader), os.fdopen(writer, "w") as file:
                json.dump(words, file)
                file.flush()
                socket.send_fds(self._warm, [b"fork"], [reader])
        except BlockingIOError:
            return False
        except OSError as error:
            print(
                f"the warm process is gone ({error}): Flower starts each ClientApp",
                file=sys.stderr,
                flush=True,
            )
            self._warm = None
            return False
        return True

    def _is_ready(self, warm: socket.socket) -> bool:
        """Whether the warm process has said so; BlockingIOError while it imports."""
        if not self._ready and not warm.recv(len(_READY), socket.MSG_DONTWAIT):
            raise ConnectionResetError("it has ended")
        self._ready = True
        return True


def _fork_clientapps(requests: socket.socket) -> list[str]:
    """Fork for every request, until the SuperExec is gone.

    Returns the command line in each forked process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # nobody waits for the forked processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in _IMPORTED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started a thread, with which a process cannot be forked")
    requests.send(_READY)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 16, 1)
        if not request:
            sys.exit()
        if os.fork() == 0:
            requests.close()
            _make_like_new()
            with os.fdopen(descriptors[0]) as file:
                return list(json.load(file))
        os.close(descriptors[0])


def _make_like_new() -> None:
    """Undo what distinguishes a forked process from one that Flower has started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path[0] = str(Path(sys.executable).parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedbn_flwr"]:
        del sys.modules[name]
    # an app may draw from it without a seed
    sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    main()
