"""Runs in which a site fails, and what they must leave: the bits of a run in process with the same
attendance.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedbn_flwr import wire
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import resolve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.runs import Run
from fedbn_flwr.experiments.server_side import run_on_grid
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import ROOT, copy_checkout
from tests.helpers.federation import OPTIONS, await_that
from tests.helpers.loopback import LoopbackFederation
from tests.helpers.processes import kill, processes_with

#: of every run with faults; its sites are north, with partition 0, and south, with partition 1
SITES = ("north", "south")
SHARED: dict[str, Any] = {
    **OPTIONS,
    "method": "fedavg",
    "rounds": 3,
    "evaluate-every": 100,
    "lr-schedule": "",
}
# by messages, unless a run asks for the side channel
SHARED |= {"clients": len(SITES), "min-nodes": 1, "exchange-port": 0}


class FaultyRuns:
    """Submits runs of an app with faults to a federation on the loopback, one after another."""

    def __init__(self, federation: LoopbackFederation) -> None:
        self.federation, self.folder = federation, federation.folder / "faults"
        self.folder.mkdir()
        #: for each fault: what became of the run, and how many seconds its round took
        self.table: list[tuple[str, str, float]] = []
        app = copy_checkout(self.folder / "fedbn-flwr")
        text = (ROOT / "tests/deployment/faulty_app.py").read_text()
        (app / "apps/client.py").write_text(text.replace("@FOLDER@", str(self.folder)))
        self._app = app

    def submit(self, faults: Sequence[Mapping[str, object]] = (), **options: object) -> "FaultyRun":
        """Submit a run with these faults; options have underscores."""
        (self.folder / "faults.json").write_text(json.dumps(list(faults)))
        given = {**SHARED, **{name.replace("_", "-"): value for name, value in options.items()}}
        return FaultyRun(self, self.federation.submit(given, self._app), given)

    def await_held(self, site: str) -> int:
        """Wait until the app of a site is in the midst of the message where it is held.

        Returns its process.
        """
        await_that(self._held(site).exists, f"{site} is held")
        return int(self._held(site).read_text())

    def await_states(self, site: str, run: "FaultyRun", server_round: int) -> None:
        """Wait until a site has kept its state after its part in a round."""
        folder = self.federation.kit(site) / "state" / run.number / str(SITES.index(site))
        await_that(
            lambda: any(folder.glob(f"{server_round}-*.records")), f"{site} has kept its state"
        )

    def release(self, site: str) -> None:
        """Let a held app go on."""
        self._held(site).unlink()

    def restore(self) -> None:
        """Bring both sites back."""
        for site in SITES:
            self._held(site).unlink(missing_ok=True)
            self.federation.relays[site].mend()
            self.federation.exchange_relays[site].mend()
            self.federation.services[f"{site}-node"].come_back()
        self.federation.await_online(SITES)

    def _held(self, site: str) -> Path:
        return self.folder / f"held-{SITES.index(site)}"


class FaultyRun:
    """One run."""

    def __init__(self, runs: FaultyRuns, number: str, options: Mapping[str, Any]) -> None:
        self._runs, self._options, self.number = runs, options, number
        self._started = time.monotonic()
        self.folder = runs.federation.results(number)

    def completes(self, fault: str, faulty_round: int, outcome: str) -> list[int]:
        """Wait for the run's success, note the seconds of a round, and return how many nodes each
        round had.
        """
        self._end("finished:completed")
        assert "failed" not in self.summary()
        seconds = read_rounds(self.folder)[faulty_round - 1]["seconds"]
        self._runs.table.append((fault, outcome, seconds))
        return self.nodes()

    def fails(self, fault: str) -> str:
        """Wait for the run's failure, note the seconds until it, and return the reason that the
        summary names.
        """
        self._end("finished:failed")
        reason = str(self.summary()["failed"])
        self._runs.table.append(
            (fault, f"the run ends: {reason}", time.monotonic() - self._started)
        )
        return reason

    def nodes(self) -> list[int]:
        """Return how many nodes took part in each round."""
        return [row["nodes"] for row in read_rounds(self.folder)]

    def summary(self) -> dict[str, Any]:
        """Return the run's summary."""
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def assert_same_model(self, folder: Path) -> None:
        """Compare the model with that of a run in process in which south takes part in the same
        rounds only.
        """
        nodes = self.nodes()
        options = {
            **self._options,
            "rounds": len(nodes),
            "min-nodes": 1,
            "node-timeout": 0,
            "device": "cpu",
        }
        grid = _AttendedGrid(client_app(bound_client_fn(resolve(options).config)), len(SITES))
        grid.attendance = nodes
        Run(resolve(options), "inprocess", folder).train(
            lambda experiment, folder, _: run_on_grid(grid, experiment, folder)
        )
        assert [row["nodes"] for row in read_rounds(folder)] == nodes
        assert (folder / "model.safetensors").read_bytes() == (
            self.folder / "model.safetensors"
        ).read_bytes()

    def _end(self, status: str) -> None:
        assert self._runs.federation.await_end(self.number) == status


class _AttendedGrid(InProcessGrid):
    """A grid with as many nodes in each round as are told, the first ones."""

    attendance: Sequence[int] = ()
    #: the latest round, of which there have been messages
    _round = 0

    def get_node_ids(self) -> list[int]:
        wanted = self.attendance[min(self._round, len(self.attendance) - 1)]
        return sorted(super().get_node_ids())[:wanted]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            self._round = int(message.content.config_records[wire.CONFIG]["server-round"])  # type: ignore[arg-type]
        return super().push_messages(messages)


def kill_serverapp(federation: LoopbackFederation) -> None:
    """Kill the process of the run's ServerApp with SIGKILL; it is started by the server's
    SuperExec.
    """
    mark = federation.services["superexec"].mark
    found = [
        process
        for process in processes_with(*mark)
        if b"flwr-serverapp" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    assert found
    kill(found)
