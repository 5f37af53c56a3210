"""A run whose nodes keep their states themselves, as in a deployment, is resumed by another
ServerApp.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.supercore.run import Run

from fedbn_flwr.clientapp import client_app, keep_states_in
from fedbn_flwr.experiments import UsageError, resolve, serve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.flower_run import RESULTS_VARIABLE
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.deaths import Death
from tests.helpers.runs import OPTIONS, results

CASES: dict[str, dict[str, Any]] = {
    "fedbn": {"momentum": 0.5, "momentum-state": "local"},
    "scaffold": {"momentum": 0.5, "momentum-state": "local", "fraction-train": 0.5},
    "fixbn": {"freeze-round": "auto", "window": 2},
    "fedtan": {"momentum": 0.5, "momentum-state": "local"},
    "hbn": {},
    "mtfl:statistics=own": {},
}
#: what is kept by nodes, and what by the server
USUAL = ["fedbn", "fixbn"]
MORE = [pytest.param(method, marks=pytest.mark.slow) for method in CASES if method not in USUAL]
FIRST = 71


class Forgetful(InProcessGrid):
    """Nodes whose SuperNodes remember nothing of another run of Flower's: each begins with empty
    contexts.
    """

    run_id = FIRST

    def _lend(self, node: int) -> Context:
        context = super()._lend(node)
        return Context(self.run_id, node, context.node_config, context.state, context.run_config)


class Nodes(PassingGrid):
    """The nodes as the ServerApp of a deployment sees them; it may die when they have answered a
    push of messages.
    """

    def __init__(self, options: dict[str, Any], sites: Path, run: int, fatal: int) -> None:
        nodes = Forgetful(
            client_app(bound_client_fn(resolve(options).config), mods=[keep_states_in(sites)]),
            int(options["clients"]),
        )
        nodes.run_id = run
        super().__init__(nodes)
        self.set_run(Run.create_empty(run_id=run))
        self._left = fatal

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages."""
        ids = super().push_messages(messages)
        self._left -= 1
        if not self._left:
            raise Death
        return ids

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Deliver and collect."""
        return self.pull_messages(self.push_messages(messages))


class Server:
    """Runs of one experiment, each going on with the one before."""

    def __init__(self, method: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = {
            "method": method,
            "model": "mlp",
            "rounds": 5,
            "clients": 4,
            "checkpoint-every": 2,
            **CASES[method],
        }
        self.options = {**OPTIONS, **given, "lr-schedule": ""}
        self.results, self.sites, self.run = folder / "results", folder / "sites", FIRST
        self.results.mkdir(parents=True)
        monkeypatch.setenv(RESULTS_VARIABLE, str(self.results))

    def go(self, fatal: int = 0, resume: bool = False) -> dict[str, Any]:
        """Run or go on, to the end or until the ServerApp dies."""
        options = dict(self.options)
        if resume:
            options["resume"], self.run = str(self.run), self.run + 1
        serve(Nodes(options, self.sites, self.run, fatal), options, self.run)
        return results(self.results / str(self.run))


@pytest.mark.parametrize("method", [*USUAL, *MORE])
@pytest.mark.sampled(1)
def test_whatever_messages_it_dies_after(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Server(method, tmp_path / "whole", monkeypatch).go()
    pushes = range(1, 200)
    resumed = 0
    for number in pushes:
        server = Server(method, tmp_path / str(number), monkeypatch)
        try:
            assert server.go(fatal=number) == expected
            break  # it has fewer pushes
        except Death:
            pass
        if list((server.results / str(FIRST)).glob("checkpoint-[0-9]*")):
            resumed += 1
            assert server.go(resume=True) == expected
    assert resumed >= 3


def test_a_second_death_and_another_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Server("fedbn", tmp_path / "whole", monkeypatch).go()
    server = Server("fedbn", tmp_path / "died", monkeypatch)
    # in round 3, whose training messages come after those of two rounds and an evaluation, or after
    # a description
    for moment, resume in ((4, False), (2, True), (2, True)):
        with pytest.raises(Death):
            server.go(fatal=moment, resume=resume)
    server.options["lr"] = 0.3
    with pytest.raises(UsageError, match=r"cannot be resumed: its lr is 0\.1, not 0\.3"):
        server.go(resume=True)
    server.options["lr"], server.run = 0.1, server.run - 1
    (server.results / str(server.run + 1)).unlink()
    assert server.go(resume=True) == expected


@pytest.mark.parametrize("resume", ["72", "../results/71", "/", "somewhere"])
def test_only_a_run_of_the_server_is_resumed(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server("fedbn", tmp_path, monkeypatch)
    (server.results / "71").mkdir()
    server.options["resume"] = resume
    with pytest.raises(
        UsageError, match="resume must be the number of a run with results on the server, got '"
    ):
        server.go()
    assert [path.name for path in server.results.iterdir()] == ["71"]
