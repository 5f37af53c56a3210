"""SCAFFOLD: the paper's algorithm step by step, and what its statement promises, the optimum for any participation."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedbn_flwr import wire
from fedbn_flwr.server.base_strategy import Round
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.server.sampling import Node as Description
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedBN, Scaffold
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, distance, make_model, make_split, participants
from tests.helpers.quadratic import Quadratics
from tests.helpers.references import make_nodes, scaffold

ALONE: Any = {"fraction_evaluate": 0.0, "min_train_nodes": 1}
EXAMPLES = [size / sum(SIZES) for size in SIZES]
UNIFORM = [1 / len(SIZES)] * len(SIZES)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("weighting", "shares"), [("examples", EXAMPLES), ("uniform", UNIFORM)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_is_the_papers_algorithm(fraction: float, weighting: Any, shares: list[float], momentum: float) -> None:
    strategy = Scaffold(fraction_train=fraction, weighting=weighting)
    drawn = participants(strategy)
    got = Federation(make_model()).run(strategy, 6, momentum=momentum, lr=0.05)
    assert {len(each) for each in drawn} == {int(fraction * len(SIZES))}
    asked = replace(INSTRUCTION, momentum=momentum, lr=0.05)
    assert distance(got, scaffold(make_model(), make_split(), make_nodes(), drawn, asked, shares)) < 1e-12


def test_reaches_the_optimum_with_a_tenth_of_the_clients_a_round() -> None:
    clients = Quadratics.draw([4] * 20)
    ends = clients.settle(Scaffold(fraction_train=0.1, weighting="uniform", **ALONE), 150)
    assert ends[-1] == pytest.approx(clients.optimum([1 / 20] * 20), abs=1e-3)


def test_reaches_the_optimum_of_all_examples_with_unequal_clients() -> None:
    sizes = list(range(1, 21))
    clients = Quadratics.draw(sizes)
    optimum = clients.optimum([size / sum(sizes) for size in sizes])
    assert abs(optimum - clients.optimum([1 / 20] * 20)) > 0.1
    ends = clients.settle(Scaffold(fraction_train=0.2, **ALONE), 100)
    assert ends[-1] == pytest.approx(optimum, abs=1e-5)


@pytest.mark.parametrize(("kept", "steps"), [("none", 12), ("local", 5), ("global", 5)])
def test_momentum_leaves_the_optimum_where_it_is(kept: Any, steps: int) -> None:
    clients = Quadratics.draw([4] * 5)
    strategy = Scaffold(fraction_evaluate=0.0, momentum_state=kept)
    ends = clients.settle(strategy, 50, lr=0.02, momentum=0.9, local_steps=steps)
    assert ends[-1] == pytest.approx(clients.optimum([0.2] * 5), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"local_steps": 1}, {"momentum": 0.9}, {"optimizer": "adam"}, {"weight_decay": 0.1}]
)
def test_a_clients_variate_is_its_gradient_where_that_is_constant(options: dict[str, Any]) -> None:
    """Clients with next to no curvature: F_i(w) = -a b w with a tiny a."""
    clients = Quadratics(np.full(3, 1e-9), np.array([1e9, 2e9, -6e9]), (1, 1, 1))
    strategy = Scaffold(fraction_evaluate=0.0)
    clients.settle(strategy, 1, lr=0.1, **options)
    sent = [reply.records[wire.CONTROL_VARIATES]["w"] for reply in strategy.train_replies]
    assert np.concatenate(sent) == pytest.approx([-1.0, -2.0, 6.0], rel=1e-6)


@pytest.mark.parametrize(("weighting", "shares"), [("examples", EXAMPLES), ("uniform", UNIFORM)])
def test_the_servers_variate_is_the_mean_of_all_clients(weighting: Any, shares: list[float]) -> None:
    strategy = Scaffold(fraction_train=0.5, weighting=weighting)
    drawn, nodes = participants(strategy), Federation(make_model())
    nodes.run(strategy, 3)
    assert len({partition for each in drawn for partition in each}) > 2
    kept = [nodes.kept(partition, wire.CONTROL_VARIATES) for partition in range(len(SIZES))]
    for name, value in strategy._variate.items():
        mean = sum(share * own[name].numpy() for share, own in zip(shares, kept, strict=True) if own)
        np.testing.assert_allclose(value, mean, atol=1e-14)


def test_variates_are_sent_in_the_models_own_numbers() -> None:
    """The server's sum over all rounds is in float64, also where the model is in float32."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    strategy = Scaffold()
    Federation(model).run(strategy, 2)
    assert {value.dtype for value in strategy._variate.values()} == {np.dtype(np.float64)}
    sent = [message.content.array_records[wire.CONTROL_VARIATES] for message in strategy._sent]
    assert {array.dtype for variates in sent for array in variates.values()} == {"float32"}


def test_entries_that_stay_on_a_node_are_not_corrected() -> None:
    class Both(Scaffold, FedBN):
        pass

    nodes, strategy = Federation(make_model()), Both()
    nodes.run(strategy, 2)
    local = {name for name in nodes.model.state_dict() if name.split(".")[1] in ("1", "4")}
    assert local
    assert not local & strategy.train_replies[0].records[wire.CONTROL_VARIATES].keys()
    assert nodes.kept(0, wire.CONTROL_VARIATES).keys() == dict(make_model().named_parameters()).keys() - local


@pytest.mark.parametrize(
    ("options", "samples", "share"),
    [
        ({}, {0: 1, 1: 1, 2: 2}, 3 / 4),
        ({"weighting": "uniform"}, {0: 1, 1: 1, 2: 2}, 2 / 3),
        # what these weights are of all clients nobody knows
        ({"weighted_by_key": "own-weight"}, {0: 1, 1: 1, 2: 2}, 2 / 3),
        # nor where a node does not know its number of samples
        ({}, {0: 0, 1: 1, 2: 2}, 2 / 3),
    ],
)
def test_the_share_of_those_that_answered(options: dict[str, Any], samples: dict[int, int], share: float) -> None:
    strategy = Scaffold(**options)
    strategy.round = Round(grid=cast(Grid, SimpleNamespace(get_node_ids=lambda: samples)))
    strategy.roster._known |= {node: Description(node, node, number) for node, number in samples.items()}
    assert strategy._share(
        [NodeReply(node, node, samples[node], {}, {}, RecordDict()) for node in (1, 2)]
    ) == pytest.approx(share)


@pytest.mark.parametrize("connected", [range(4), range(3)])
def test_where_all_were_to_answer_the_others_are_asked_for_their_samples(connected: range) -> None:
    """Nobody has described itself before: no node was drawn. The last one may have answered and disconnected."""
    strategy, nodes = Scaffold(), Federation(make_model()).grid
    strategy.round = Round(grid=InProcessGrid(nodes._client_app, len(SIZES), partitions=connected))
    replies = [NodeReply(1000 + index, index, size, {}, {}, RecordDict()) for index, size in enumerate(SIZES)][1:]
    assert strategy._share(replies) == pytest.approx(sum(SIZES[1:]) / sum(SIZES))


def test_where_nodes_count_the_same_nobody_is_asked() -> None:
    strategy = Scaffold(weighting="uniform")
    strategy.round = Round(grid=cast(Grid, SimpleNamespace(get_node_ids=lambda: [0, 1, 2])))
    replies = [NodeReply(node, node, 5, {}, {}, RecordDict()) for node in (1, 2)]
    assert strategy._share(replies) == pytest.approx(2 / 3)
