"""Flower's command line with a home, ports and a working directory of its own."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.checkout import BIN, environment, run
from tests.helpers.ports import free_ports
from tests.helpers.processes import kill_processes
from tests.helpers.waiting import wait_until


@dataclass(frozen=True)
class FlowerCommand:
    """The program `flwr` of an environment."""

    program: Path
    home: Path
    env: dict[str, str]

    def run(self, app: Path, *options: str, **run_config: object) -> tuple[str, str]:
        """`flwr run`; what was shown, and the status of the run, which the exit code does not
        tell.
        """
        shown = self._run(app, "--stream", *options, **run_config)
        return shown, self.status(_number(shown))

    def start(self, app: Path, **run_config: object) -> str:
        """Start a run, do not wait, and return its number."""
        return _number(self._run(app, **run_config))

    def _run(self, app: Path, *options: str, **run_config: object) -> str:
        config = " ".join(
            f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in run_config.items()
        )
        return self("run", str(app), "--run-config", config, *options)

    def status(self, run_id: str) -> str:
        """How a run ended; its log ends before its status says so."""
        seen: list[str] = []

        def finished() -> bool:
            shown = self("list", "--run-id", run_id, "--format", "json")
            seen.append(str(json.loads(shown)["runs"][0]["status"]))
            return seen[-1].startswith("finished")

        wait_until(finished)
        return seen[-1]

    def __call__(self, *arguments: str) -> str:
        return run(self.program, *arguments, cwd=self.home, env=self.env)


def _number(shown: str) -> str:
    (run_id,) = re.findall(r"Successfully started run (\d+)", shown)
    return str(run_id)


@contextmanager
def flower_command(home: Path, bin_folder: Path = BIN) -> Iterator[FlowerCommand]:
    """Make the home; the first `flwr run` starts a local SuperLink, which ends afterwards, as all
    that it started.
    """
    home.mkdir()
    ports = free_ports(2)
    env = environment(
        FLWR_HOME=str(home),
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(ports[0]),
        FLWR_LOCAL_CONTROL_API_PORT=str(ports[1]),
        FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
        FLWR_TELEMETRY_ENABLED="0",
        OMP_NUM_THREADS="1",
    )
    try:
        yield FlowerCommand(
            bin_folder / "flwr", home, {**env, "PATH": f"{bin_folder}:{env['PATH']}"}
        )
    finally:
        kill_processes("FLWR_HOME", str(home))
