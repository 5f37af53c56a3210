"""Processes that outlive the command that started them: found by their environment, ended by their
ids.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

from tests.helpers.waiting import wait_until

#: in the environment of what a test starts
MARK = "FEDBN_FLWR_TEST"


def processes_with(variable: str, value: str) -> list[int]:
    """Return the living processes that were started with an environment variable, without this
    one.
    """
    entry = f"{variable}={value}".encode()
    return [
        number
        for number in _all_processes()
        if number != os.getpid() and entry in _environment(number)
    ]


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(process: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    return ""


def wait_for_end(variable: str, value: str) -> bool:
    """Return whether such processes end by themselves."""
    return wait_until(lambda: not processes_with(variable, value), pause=0.2)


def kill_processes(variable: str, value: str) -> None:
    """End such processes and wait until they are gone.

    They are killed at once: to ask them would take the time that each one needs to end, and tests
    that look at how processes end have done so before.
    """

    def killed() -> bool:
        # a process may have started another one before it died
        left = processes_with(variable, value)
        kill(left)
        return not left

    assert wait_until(killed, pause=0.1), processes_with(variable, value)


def kill(processes: Iterable[int]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _all_processes() -> Iterable[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def _environment(process: int) -> list[bytes]:
    # the process may have ended, or belong to somebody else; one that ended and was not waited for
    # has none
    with suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write files of at most so many bytes, as if the disk were full then."""
    before, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, (before, hard))
