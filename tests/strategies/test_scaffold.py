"""SCAFFOLD: the algorithm of its paper, and the server's variate where nodes are silent or away."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Message
from torch import nn

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedBN, Scaffold
from tests.helpers.harness import (
    INSTRUCTION,
    SIZES,
    Federation,
    distance,
    make_model,
    make_split,
    participants,
)
from tests.helpers.references import make_nodes, scaffold

EXAMPLES = [size / sum(SIZES) for size in SIZES]
UNIFORM = [1 / len(SIZES)] * len(SIZES)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("weighting", "shares"), [("examples", EXAMPLES), ("uniform", UNIFORM)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_is_the_papers_algorithm(
    fraction: float, weighting: Any, shares: list[float], momentum: float
) -> None:
    strategy = Scaffold(fraction_train=fraction, weighting=weighting)
    drawn = participants(strategy)
    got = Federation(make_model()).run(strategy, 6, momentum=momentum, lr=0.05)
    assert {len(each) for each in drawn} == {int(fraction * len(SIZES))}
    asked = replace(INSTRUCTION, momentum=momentum, lr=0.05)
    assert (
        distance(got, scaffold(make_model(), make_split(), make_nodes(), drawn, asked, shares))
        < 1e-12
    )


def test_variates_are_sent_in_the_models_own_numbers() -> None:
    nodes, strategy = Federation(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), Scaffold()
    nodes.run(strategy, 2)
    sent = strategy.package([1000], nodes.initial)[1000][wire.CONTROL_VARIATES]
    assert {array.dtype for array in sent.values()} == {"float32"}


def test_entries_that_stay_on_a_node_are_not_corrected() -> None:
    class Both(Scaffold, FedBN):
        state: Any

    nodes, strategy = Federation(make_model()), Both()
    nodes.run(strategy, 2)
    local = {name for name in nodes.model.state_dict() if name.split(".")[1] in ("1", "4")}
    assert local
    assert not local & strategy.training.replies[0].records[wire.CONTROL_VARIATES].keys()
    assert (
        nodes.kept(0, wire.CONTROL_VARIATES).keys()
        == dict(make_model().named_parameters()).keys() - local
    )


def assert_mean_of_variates(strategy: Scaffold, nodes: Federation, shares: Sequence[float]) -> None:
    """Check the server's variate against those that nodes keep; one that never replied has none."""
    kept = [nodes.kept(partition, wire.CONTROL_VARIATES) for partition in range(len(SIZES))]
    for name, value in strategy.package([1001], nodes.initial)[1001][wire.CONTROL_VARIATES].items():
        mean = sum(
            share * own[name].numpy() for share, own in zip(shares, kept, strict=True) if own
        )
        np.testing.assert_allclose(value.numpy(), mean, atol=1e-14)


class Silent(InProcessGrid):
    """A grid whose first node is connected, and answers from some round on."""

    returns: float = inf
    round = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        kinds = [message.metadata.message_type for message in messages]
        self.round += "train" in kinds
        self.asked = [*getattr(self, "asked", []), *kinds]
        lost = [
            message.metadata.dst_node_id == 1000 and self.round < self.returns
            for message in messages
        ]
        ids = iter(
            super().push_messages(
                message for message, gone in zip(messages, lost, strict=True) if not gone
            )
        )
        return ["lost" if gone else next(ids) for gone in lost]


@pytest.mark.parametrize(("weighting", "shares"), [("examples", EXAMPLES), ("uniform", UNIFORM)])
@pytest.mark.parametrize("returns", [2, inf])
def test_a_node_that_is_silent_counts_like_the_others_until_it_replies(
    weighting: Any, shares: list[float], returns: float
) -> None:
    nodes, strategy = (
        Federation(make_model(), grid=Silent),
        Scaffold(weighting=weighting, exchange_timeout=0.05),
    )
    grid = cast(Silent, nodes.grid)
    grid.returns = returns
    nodes.run(strategy, 3)
    assert grid.asked.count("query.describe") == (weighting == "examples")
    total = 1.0 if returns == 2 else 4 / 3 * sum(shares[1:])
    assert_mean_of_variates(strategy, nodes, [share / total for share in shares])


def test_a_weight_that_only_replies_say_is_of_all_clients_once_all_have_replied() -> None:
    strategy, nodes = (
        Scaffold(fraction_train=0.5, weighted_by_key="own-weight"),
        Federation(make_model(), wrap=weighs),
    )
    drawn = participants(strategy)
    nodes.run(strategy, 8)
    assert {partition for each in drawn for partition in each} == set(range(len(SIZES)))
    assert_mean_of_variates(strategy, nodes, EXAMPLES)


def weighs(client: BNClient, index: int) -> BNClient:
    """Let a client say its number of samples by another name."""
    reply = client.reply

    def named(metrics: Any, *more: Any) -> Any:
        return reply({**metrics, "own-weight": SIZES[index]}, *more)

    cast(Any, client).reply = named
    return client
