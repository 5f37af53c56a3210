"""End the processes that a benchmark has started, when the benchmark itself is killed.

A killed driver cannot wake the processes that it had stopped. They keep the server of forks alive,
and their part of Ray. A process that waits for a cluster does not notice that its driver is gone.
One that does nothing else notices: its input ends.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

#: in the environment of every process that a benchmark starts
MARK = "FEDBN_BENCHMARK"
#: seconds that processes have to end by themselves
ENDING = 10.0


@cache
def end_with_this_process() -> subprocess.Popen[bytes]:
    """Let all processes that this one starts from now on end soon after it, however it ends."""
    mark, silent = uuid4().hex, subprocess.DEVNULL
    words = (sys.executable, __file__, mark)
    # a session of its own: what the terminal sends to the benchmark does not reach it
    watcher = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True
    )
    os.environ[MARK] = mark
    return watcher


def end(mark: str) -> None:
    """Wake all processes with a mark, and kill those that do not end by themselves."""
    deadline = time.monotonic() + ENDING
    _signal(_marked(mark), signal.SIGCONT)
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    while left := _marked(mark):  # a process may have started another one before it died
        _signal(left, signal.SIGKILL)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """Return the living processes with a mark; those that ended have no environment."""
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended, or belong to somebody else
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
