"""Replies that are added up where clients train: their mean, which stay as they are, and who gets
single ones.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments.engines import open_grid
from fedbn_flwr.experiments.experiment import resolve
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.reply_pool import ReplyPool, Trained
from fedbn_flwr.strategies import FedAvg, FedBN, register_strategy
from fedbn_flwr.wire.pooled import Summed
from tests.helpers.engine_comparison import (
    EXACT,
    asked,
    memories,
    memory_difference,
    quiet,
    watching,
)
from tests.helpers.harness import (
    INSTRUCTION,
    SIZES,
    Federation,
    distance,
    make_float32_model,
    make_model,
)
from tests.helpers.registered import registries_restored
from tests.helpers.runs import OPTIONS
from tests.helpers.tellers import engine, telling


def replies(nodes: Federation, **options: Any) -> list[Message]:
    """Return what stacks reply to a round's messages."""
    nodes.grid = StackedGrid(client_app(nodes.client), len(SIZES), **options)
    return list(nodes.grid.send_and_receive(asked(nodes, INSTRUCTION)))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("chunk", [1, 2, 4], ids=["one by one", "two stacks", "one stack"])
@pytest.mark.parametrize("model", [make_model, make_float32_model])
def test_the_mean_of_stacks_is_that_of_single_replies(
    model: Callable[[], nn.Module], chunk: int, weighting: str
) -> None:
    single = replies(Federation(model()), chunk=chunk)
    (mean,) = replies(Federation(model()), chunk=chunk, average_by=weighting)
    assert isinstance(mean.content, Summed)
    assert mean.content.counts == dict(zip(range(1000, 1004), SIZES, strict=True))
    shares = np.array([1] * 4 if weighting == "uniform" else SIZES) / (
        4 if weighting == "uniform" else sum(SIZES)
    )
    rows = [state.view_arrays(reply.content.array_records[wire.ARRAYS]) for reply in single]
    for name, value in state.view_arrays(mean.content.array_records[wire.ARRAYS]).items():
        values = np.stack([row[name] for row in rows])
        assert value.dtype == values.dtype
        if value.dtype.kind != "f":
            np.testing.assert_array_equal(value, values.max(0))
            continue
        wanted = np.tensordot(shares, values.astype(np.float64), 1)
        # rounded once: half a last place, beside the error of a sum of four in float64
        half_a_place = np.spacing(np.abs(wanted).astype(value.dtype)).astype(np.float64) / 2
        error_of_sum = (
            8
            * np.finfo(np.float64).eps
            * np.tensordot(shares, np.abs(values.astype(np.float64)), 1)
        )
        assert (np.abs(value - wanted) <= half_a_place + error_of_sum).all()
    losses: list[Any] = [reply.content[wire.METRICS][wire.TRAIN_LOSS] for reply in single]
    assert mean.content[wire.METRICS][wire.TRAIN_LOSS] == pytest.approx(
        np.average(losses, weights=SIZES), rel=1e-15
    )


def stack(values: list[float], examples: int = 2, **metrics: float) -> Trained:
    """Return two clients that have trained together, the second with these values and numbers."""
    nodes = Federation(make_model())
    grid = StackedGrid(client_app(nodes.client), len(SIZES))
    jobs = grid._prepare(dict(enumerate(asked(nodes, INSTRUCTION)[:2])))
    told = [(2, {wire.TRAIN_LOSS: 1.0}), (examples, metrics or {wire.TRAIN_LOSS: 3.0})]
    answers = [
        Reply(count, {**said, wire.PARTITION_ID: row}) for row, (count, said) in enumerate(told)
    ]
    rows = {
        "weight": torch.tensor([[1.0, 1.0], values], dtype=torch.float64),
        "count": torch.tensor([3, 2]),
    }
    return Trained(jobs, answers, {wire.ARRAYS: rows})


@pytest.mark.parametrize(
    "odd",
    [
        {"values": [2.0, float("nan")]},
        {"values": [2.0, float("-inf")]},
        # of which float32 has none; their mean would do
        {"values": [2.0, 6e38]},
        {"examples": 0},
        {"examples": 2**53 + 2},
        {"train-loss": float("inf")},
    ],
    ids=str,
)
def test_what_the_server_has_to_look_at_stays_as_it_is(odd: dict[str, Any]) -> None:
    pool = ReplyPool("examples")
    messages = pool.add(stack(**{"values": [2.0, 3.0], **odd}))
    contents = [message.content for message in messages.values() if message]
    assert [content[wire.METRICS][wire.NUM_EXAMPLES] for content in contents] == [
        2,
        odd.get("examples", 2),
    ]
    assert not pool.mean()
    np.testing.assert_array_equal(
        state.view_arrays(contents[1].array_records[wire.ARRAYS])["weight"],
        odd.get("values", [2.0, 3.0]),
    )


def test_what_is_unlike_the_first_replies_stays_as_it_is() -> None:
    pool, unlike = ReplyPool("examples"), stack([2.0, 3.0])
    unlike.stacked[wire.ARRAYS]["more"] = torch.zeros(2)  # type: ignore[index]
    assert pool.add(stack([2.0, 3.0])) == {0: None, 1: None}
    assert all(pool.add(unlike).values())
    (mean,) = pool.mean().values()
    np.testing.assert_array_equal(
        state.view_arrays(mean.content.array_records[wire.ARRAYS])["weight"], [1.5, 2.0]
    )


@pytest.mark.parametrize(
    ("strategy", "case"), [(FedAvg, "nan"), (FedAvg, "none"), (FedBN, "nan"), (FedBN, "none")]
)
def test_a_node_that_cannot_be_added_is_refused_by_name(strategy: type[FedAvg], case: str) -> None:
    """Also beside others in a stack, which count as if it had not been there."""

    def spoil(client: BNClient, index: int) -> BNClient:
        if index == 1 and case == "nan":
            client.train_split = replace(
                client.train_split, inputs=client.train_split.inputs * float("nan")
            )
        return client

    wrap = spoil if case == "nan" else telling({1: lambda _: 0})
    ends = {}
    for kind in ("inprocess", "sums"):
        nodes, method = Federation(make_model(), wrap=wrap), quiet(strategy)
        with watching() as watch, engine(kind, nodes) as grid:
            ends[kind] = (
                nodes.run(method, 2, grid),
                memories(grid),
                [reply.num_examples for reply in method.training.replies],
            )
        named = [text for text in watch.warnings if "Node 1001 is left out of this round" in text]
        assert len(named) == (2 if case == "nan" else 0)
    assert distance(ends["sums"][0], ends["inprocess"][0]) < EXACT
    assert memory_difference(ends["sums"][1], ends["inprocess"][1]) < EXACT
    assert (
        ends["sums"][2] == ends["inprocess"][2] == ([7, 20, 5] if case == "nan" else [7, 0, 20, 5])
    )


AUTO = {"method": "fixbn:freeze-round=auto"}


class OwnMethod(FedAvg):
    """A user's own, whose hooks may look at anything."""


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("options", "weighting"),
    [
        ({}, "examples"),
        ({"method": "fedavg:weighting=uniform"}, "uniform"),
        ({"record-dynamics": "1"}, ""),
        ({"method": "fedavg:robust=median"}, ""),
        ({"method": "fedbs"}, ""),
        (AUTO, ""),
        ({"method": "own-method"}, ""),
    ],
    ids=str,
)
def test_whoever_needs_single_replies_gets_them(
    options: dict[str, str], weighting: str, workers: str, tmp_path: Path
) -> None:
    with registries_restored():
        register_strategy("own-method")(OwnMethod)
        experiment = resolve({**OPTIONS, "clients": "4", "workers": workers, **options})
        material, strategy = Material.of(experiment.config), experiment.make_strategy(4)
        content = RecordDict({wire.ARRAYS: state.to_record(material.model.state_dict())})
        content[wire.CONFIG] = INSTRUCTION.to_config()
        with open_grid(material, strategy, tmp_path, "stacked") as grid:
            messages = [Message(content, node, "train") for node in grid.get_node_ids()]
            found = [reply.content for reply in grid.send_and_receive(messages)]
    assert len(found) == (int(workers) if weighting else 4)
    assert {isinstance(each, Summed) for each in found} == {bool(weighting)}


@pytest.mark.parametrize("portion", [100, 1])
@pytest.mark.parametrize(("kind", "means"), [("sums", [1000]), ("workers", [1000, 1001])])
def test_whoever_asks_nodes_waits_for_no_reply_that_is_in_a_mean(
    kind: str, means: list[int], portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.in_process.PORTION", portion)
    alone = Federation(make_model())
    content = RecordDict({wire.ARRAYS: alone.initial, wire.CONFIG: INSTRUCTION.to_config()})
    with engine(kind, alone) as grid:
        messages = [Message(content, node, "train") for node in grid.get_node_ids()]
        answers = ask_nodes(grid, messages, timeout=600)
    assert sorted(answers) == means
