"""Processes that are restarted when they end, as `restart: unless-stopped` does it, with a log file each."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from tests.helpers.processes import kill_processes

#: seconds before a service that has ended is started again
PAUSE = 2.0
#: in the environment of a service and of every process that it starts
_MARK = "FEDBN_FLWR_SERVICE"


class Supervised(Thread):
    """Runs a command again whenever it ends, until it is stopped; `starts` counts how often."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.command, self.log = list(command), log
        self.environment = {**environment, _MARK: str(log)}
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted, self._stopped = Event(), Event()
        self._wanted.set()

    @property
    def mark(self) -> tuple[str, str]:
        """What the environment of the command, and of all that it starts, has."""
        return _MARK, str(self.log)

    def run(self) -> None:
        """Start the command whenever it is not running."""
        while not self._stopped.is_set():
            self._wanted.wait()
            if self._stopped.is_set():
                break
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self.command, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            self.starts += 1
            self._process.wait()
            self._stopped.wait(PAUSE)

    def kill(self, stay_away: bool = False) -> None:
        """Kill the command with SIGKILL, and not what it has started; with `stay_away` until `come_back`."""
        if stay_away:
            self._wanted.clear()
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def come_back(self) -> None:
        """Start the command again after `kill(stay_away=True)`."""
        self._wanted.set()

    def stop(self) -> None:
        """End the command and everything that it has started."""
        self._stopped.set()
        self._wanted.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self.is_alive():
            self.join()
        kill_processes(_MARK, str(self.log))

    def text(self) -> str:
        """Return what the command has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""
