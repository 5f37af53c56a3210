"""A federation that is provisioned with the project's own commands, as its operator sees it."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from flwr.cli.build import build_fab_from_disk

from fedbn_flwr.deployment import health
from fedbn_flwr.deployment.cli import main as fedbn_flwr
from fedbn_flwr.deployment.operator import Operator
from tests.helpers.checkout import BIN, copy_checkout, environment, run
from tests.helpers.runs import results, run_in
from tests.helpers.waiting import PATIENCE, wait_until

#: small runs whose every bit is compared
OPTIONS: dict[str, Any] = {
    "partition": "classes:5",
    "model": "mlp",
    "local-steps": 2,
    "batch-size": 8,
    "evaluate-every": 2,
    "seed": 3,
}
#: seconds between two looks at a federation; those that ask the server cost a process each
LOOK = 2.0
#: how many looks at a run's folder stand for one at the server
SELDOM = 10
#: seconds until a test gives up on a run
LONGEST_RUN = 3600.0


class Federation:
    """Provisions a federation, and submits runs to it."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        self.folder, self.out, self.sites = (
            folder,
            folder / "federation",
            tuple(description["sites"]),
        )
        self.home = self.out / "operator"
        #: where sites and others ask for its health
        self.server = f"{description['server']}:{description['port']}"
        file = folder / "federation.yaml"
        file.write_text(yaml.safe_dump(dict(description)))
        command("provision", file, "--out", self.out)
        for site in self.sites:
            command("site", "init", self.kit(site))
        self.app = copy_checkout(folder / "fedbn-flwr")
        self.operator = Operator(self.home)

    def kit(self, site: str) -> Path:
        """Return a site's folder."""
        return self.out / "sites" / site

    def register(self) -> None:
        """Register every site as soon as the SuperLink answers, and wait until all are online."""
        self.await_answer()
        command("site", "register", *self._keys(self.sites), "--operator", self.home)
        self.await_online(self.sites)

    def await_answer(self) -> None:
        """Wait until the SuperLink answers."""
        check = f"answers https://{self.server}/health {self.home / 'ca.crt'}"

        def answers() -> bool:
            with suppress(OSError):
                return bool(health.check_health(check))
            return False

        await_that(answers, "the SuperLink answers")

    def online(self) -> set[str]:
        """Return the sites whose nodes are online."""
        nodes = {node["node-id"] for node in self.operator.nodes() if node["status"] == "online"}
        return {site for site, node in self.operator.sites().items() if node in nodes}

    def await_online(self, sites: Sequence[str]) -> None:
        """Wait until these sites are online, and no others."""
        await_that(lambda: self.online() == set(sites), f"online: {', '.join(sites) or 'none'}")

    def submit(self, options: Mapping[str, object], app: Path | None = None) -> str:
        """Submit a run of the project, or of another app, with Flower's own command.

        Returns its number.
        """
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
        words = ("run", str(app or self.app), self.operator.name, "--run-config", config)
        shown = run(
            BIN / "flwr", *words, cwd=self.folder, env=environment(FLWR_HOME=str(self.home))
        )
        (number,) = re.findall(r"Successfully started run (\d+)", shown)
        return str(number)

    def status(self, number: str) -> str:
        """Return the state of a run."""
        return next(
            str(item["status"]) for item in self.operator.runs() if str(item["run-id"]) == number
        )

    def log(self, number: str) -> str:
        """Return what the ServerApp of a run has said so far."""
        words = ("log", number, self.operator.name, "--show")
        return run(BIN / "flwr", *words, cwd=self.folder, env=environment(FLWR_HOME=str(self.home)))

    def await_end(self, number: str) -> str:
        """Wait until a run has ended, and return how."""
        summary, looks, status = self.results(number) / "summary.json", count(1), ""

        def ended() -> bool:
            nonlocal status
            # a run that fails before its first round leaves no summary
            status = self.status(number) if summary.exists() or not next(looks) % SELDOM else ""
            return status.startswith("finished")

        await_that(ended, f"run {number} ends", LONGEST_RUN)
        return status

    def results(self, number: str) -> Path:
        """Return the folder of a run's results on the server."""
        return self.out / "server" / "results" / number

    def both(self, options: Mapping[str, object], folder: Path) -> tuple[Path, Path]:
        """Run in the federation and in this process; returns the two folders of results."""
        number = self.submit(options)
        assert self.await_end(number) == "finished:completed"
        words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        words += ["--clients", str(len(self.sites)), "--engine", "inprocess", "--device", "cpu"]
        command("run", *words, "--results-dir", folder / "here")
        return self.results(number), run_in(folder / "here")

    def _keys(self, sites: Sequence[str]) -> list[Path]:
        return [self.kit(site) / f"{site}.pub" for site in sites]


def app_hash(app: Path) -> str:
    """Return the hash by which Flower knows an app: that of the bundle which `flwr build` makes."""
    return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


def command(*words: object) -> None:
    """Run `fedbn-flwr` in this process, and fail unless it succeeds."""
    assert fedbn_flwr([str(word) for word in words]) == 0, words


def await_that(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition, and fail with its name if it does not come true."""
    assert wait_until(condition, LOOK, patience), f"does not come true: {what}"


def assert_same_results(there: Path, here: Path) -> None:
    """Compare two runs by what they have written."""
    assert results(there) == results(here)
