"""One process at a time in a folder of results."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import IO

from fedbn_flwr.experiments.output.run_folder import make_folder
from fedbn_flwr.plugins.options import UsageError

#: held by the process that writes into the folder
LOCK = "lock"


def is_running(folder: Path) -> bool:
    """Return whether a process writes results into this folder."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody ran anything here yet, or the folder has no locks
        return False
    return False


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder of results, so that no other process writes into it; a UsageError if one does.

    A new folder in which nothing was written is removed again if the work fails.
    """
    is_new = not folder.exists()
    if not os.access(make_folder(folder), os.W_OK):  # what is finished can be read, and whatever writes says so
        yield
        return
    with (folder / LOCK).open("w") as file:
        if not _locked(file):
            raise UsageError(f"another process is running in {folder}")
        try:
            yield
        except BaseException:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
            raise


def _locked(file: IO[str]) -> bool:
    """Lock a file, also where a report asks at this moment whether a process runs."""
    for _ in range(10):
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        sleep(0.05)
    return False
