"""Processes that outlive the command that started them: found by what is in their environment, ended by their id."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def processes_with(variable: str, value: str) -> list[int]:
    """The living processes that were started with an environment variable, this one not counted."""
    entry = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            # it may have ended, or belong to somebody else
            with suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def end(variable: str, value: str, patience: float = 30.0) -> None:
    """Ask such processes to end, and after `patience` seconds kill what is left."""
    _signal(processes_with(variable, value), signal.SIGTERM)
    if not gone(variable, value, patience):
        _signal(processes_with(variable, value), signal.SIGKILL)
        assert gone(variable, value, patience), processes_with(variable, value)


def gone(variable: str, value: str, patience: float) -> bool:
    """Wait for such processes to end by themselves."""
    deadline = time.monotonic() + patience
    while processes_with(variable, value):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
