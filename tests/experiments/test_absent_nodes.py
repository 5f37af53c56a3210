"""Nodes that are absent: how long a run waits for them, when it goes on without them, and what it
leaves otherwise.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import UsageError, resolve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.experiments.runs import Run
from fedbn_flwr.experiments.server_side import run_on_grid
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import CannotTrainError
from fedbn_flwr.wire import Instruction
from tests.helpers.runs import OPTIONS

CLIENTS = 3
#: `node-timeout` is short, since nobody comes
SHARED = {
    **OPTIONS,
    "clients": str(CLIENTS),
    "lr-schedule": "",
    "evaluate-every": "1",
    "node-timeout": "0",
}


class LeavingGrid(InProcessGrid):
    """A grid whose last node is connected only in the first rounds."""

    rounds = 0
    _sent = 0

    def get_node_ids(self) -> list[int]:
        nodes = list(super().get_node_ids())
        return nodes if self._sent < self.rounds else nodes[:-1]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._sent += any(message.metadata.message_type == "train" for message in messages)
        return super().push_messages(messages)


def federate(folder: Path, rounds_of_last_node: int, **changes: str) -> dict[str, Any]:
    """Run with a node that leaves after some rounds, and return the summary."""
    given = {**SHARED, **{name.replace("_", "-"): value for name, value in changes.items()}}
    experiment = resolve(given, federation=True)
    grid = LeavingGrid(client_app(bound_client_fn(experiment.config)), CLIENTS)
    grid.rounds = rounds_of_last_node
    return run_on_grid(grid, experiment, folder)


def nodes_by_round(folder: Path) -> list[int]:
    return [row["nodes"] for row in read_rounds(folder)]


@pytest.mark.parametrize("there", [0, 1])
def test_rounds_go_on_without_a_node_that_left_or_never_came(there: int, tmp_path: Path) -> None:
    # the clients that are there keep their share of the data
    assert federate(tmp_path, there, min_nodes="2")["clients"] == CLIENTS
    assert nodes_by_round(tmp_path) == [2 + there, 2, 2]


def test_a_summary_says_how_many_rounds_brought_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = BNClient.train

    def failing(client: BNClient, received: Any, instruction: Instruction) -> Reply:
        if instruction.server_round == 2:
            raise RuntimeError("I was told to")
        return train(client, received, instruction)

    monkeypatch.setattr(BNClient, "train", failing)
    assert federate(tmp_path, 3)["rounds-skipped"] == 1
    assert nodes_by_round(tmp_path) == [3, 0, 3]


@pytest.mark.parametrize(("clients", "found"), [("3", "2 of 3"), ("0", "2 of 3")])
def test_too_few_nodes_at_the_start_are_one_line(tmp_path: Path, clients: str, found: str) -> None:
    with pytest.raises(
        CannotTrainError, match=f"^{found} nodes connected within 0 seconds: node 1000, node 1001$"
    ):
        federate(tmp_path, 0, clients=clients, min_nodes="3")
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_go_on_leaves_its_last_model_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        CannotTrainError, match=r"^2 of 3 nodes connected within 0 seconds: node 1000, node 1001$"
    ):
        federate(tmp_path / "cut", 2)
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert summary["failed"] == "2 of 3 nodes connected within 0 seconds: node 1000, node 1001"
    assert (summary["rounds-done"], summary["rounds"]) == (2, 3)
    assert summary["accuracy"] == read_rounds(tmp_path / "cut")[-1]["accuracy"]
    # the model is that of a run of so many rounds
    assert "failed" not in federate(tmp_path / "whole", 2, rounds="2")
    left, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert left.keys() == whole.keys()
    assert all((left[name] == whole[name]).all() for name in left)


def test_a_run_that_ends_in_its_first_round_says_why_and_gives_its_folder_to_another(
    tmp_path: Path,
) -> None:
    options = {"method": "fedprox", "fraction-train": "1", "lr": "1e30"}
    with pytest.raises(CannotTrainError) as error:
        federate(tmp_path, 3, **options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["failed"], summary["rounds-done"]) == (str(error.value), 0)
    assert not (tmp_path / "model.safetensors").exists()
    Run(resolve({**SHARED, "lr": "0.1"}), "flower", tmp_path).refuse_other_run()


def test_more_nodes_than_clients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the federation has 3 nodes, the experiment 2 clients"):
        federate(tmp_path, 3, clients="2")
