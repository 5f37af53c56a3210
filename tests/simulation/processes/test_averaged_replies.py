"""Replies that a worker averages: which it leaves as they are, and who gets single ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import wire
from fedbn_flwr.experiments.engines import open_grid
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.simulation import InProcessGrid
from fedbn_flwr.simulation.processes.averaged_replies import average_replies
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from fedbn_flwr.state import arrays_to_record
from fedbn_flwr.strategies import FedAvg, register_strategy
from fedbn_flwr.wire.pooled import Summed
from tests.helpers.harness import INSTRUCTION, Federation, make_model
from tests.helpers.registered import registries_restored
from tests.helpers.runs import OPTIONS
from tests.helpers.tellers import engine


@pytest.fixture
def run_of_ours() -> None:
    """Messages need a run, which a worker's grid gives them."""
    InProcessGrid(ClientApp(), 0)


def reply(node: int, values: Sequence[float] = (1.0,), examples: float = 2, **metrics: float) -> Message:
    arrays: Any = {"weight": np.array(values, np.float32), "count": np.array(node)}
    known: Any = {wire.NUM_EXAMPLES: examples, wire.PARTITION_ID: node - 1000, **metrics}
    content = RecordDict({wire.ARRAYS: arrays_to_record(arrays), wire.METRICS: MetricRecord(known)})
    asked = Message(RecordDict(), node, "train")
    asked.metadata.__dict__["_message_id"] = str(node)
    return Message(content, reply_to=asked)


@pytest.mark.usefixtures("run_of_ours")
@pytest.mark.parametrize(
    "odd",
    [{"values": [float("nan")]}, {"values": [1.0, 2.0]}, {"examples": 0}, {"loss": float("inf")}, {"other": 1.0}],
    ids=str,
)
def test_what_the_server_has_to_look_at_stays_as_it_is(odd: dict[str, Any]) -> None:
    """Not finite, of another shape, without weight, of infinite loss, or of other metrics."""
    other = reply(1002, **{"loss": 1.0, **odd})
    content = other.content
    mean, same, nothing = average_replies([reply(1000, loss=1.0), other, reply(1001, loss=1.0)], "examples")
    assert same is other
    assert other.content is content
    assert nothing is None
    assert mean is not None
    assert isinstance(mean.content, Summed)
    assert set(mean.content.nodes) == {1000, 1001}


AUTO = {"method": "fixbn:freeze-round=auto"}


class OwnMethod(FedAvg):
    """A user's own, whose hooks may look at anything."""


@pytest.mark.parametrize(
    ("options", "average_by"),
    [
        ({}, "examples"),
        ({"method": "fedavg:weighting=uniform"}, "uniform"),
        ({"record-dynamics": "1"}, ""),
        ({"method": "fedbs"}, ""),
        (AUTO, ""),
        ({"method": "own-method"}, ""),
    ],
    ids=str,
)
def test_whoever_needs_single_replies_gets_them(options: dict[str, str], average_by: str, tmp_path: Path) -> None:
    with registries_restored():
        register_strategy("own-method")(OwnMethod)
        experiment = resolve({**OPTIONS, "clients": "4", "workers": "2", **options})
        material, strategy = Material.of(experiment.config), experiment.make_strategy(4)
        with open_grid(material, strategy, tmp_path, "stacked") as grid:
            assert isinstance(grid, WorkersGrid)
            assert grid._average_by == average_by


@pytest.mark.parametrize(("portion", "means"), [(100, [1000, 1001]), (1, [1000, 1001, 1002, 1003])])
def test_whoever_asks_nodes_waits_for_no_reply_that_is_in_a_mean(
    portion: int, means: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.in_process.PORTION", portion)
    alone = Federation(make_model())
    content = RecordDict({wire.ARRAYS: alone.initial, wire.CONFIG: INSTRUCTION.to_config()})
    with engine("workers", alone) as grid:
        messages = [Message(content, node, "train") for node in grid.get_node_ids()]
        replies = ask_nodes(grid, messages, timeout=600)
    assert sorted(replies) == means
