"""FedNorm: BN by domain."""

from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr import state
from fedbn_flwr.strategies import CannotTrainError, FedAvg, FedBN, FedNorm, NodeReply, SiloBN
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, distance, make_model
from tests.helpers.references import EVERYTHING, bn_entries, federated, make_nodes, weighted_mean


def test_with_a_domain_a_node_it_trains_as_fedbn_does() -> None:
    one, other = Federation(make_model()), Federation(make_model())
    mine, theirs = one.run(FedNorm()), other.run(FedBN())
    shared = set(mine) - state.group_keys(one.model, "bn")
    assert all(torch.equal(mine[name], theirs[name]) for name in shared)


def test_with_a_single_domain_it_is_fedavg() -> None:
    nodes = Federation(make_model())
    domains = nodes.split.domains
    assert domains is not None
    domains.zero_()
    assert distance(nodes.run(FedNorm()), Federation(make_model()).run(FedAvg())) == 0


def test_two_nodes_of_a_domain_share_bn() -> None:
    """One round by hand: the second round starts from BN averaged within the pair, and all else
    over all nodes.
    """
    nodes = Federation(make_model())
    domains = nodes.split.domains
    assert domains is not None
    domains.floor_divide_(2)
    strategy = FedNorm()
    nodes.run(strategy, 1)
    ends = [federated(make_model(), nodes.split, [node], 1, INSTRUCTION) for node in make_nodes()]
    for pair in ((0, 1), (2, 3)):
        expected = weighted_mean([ends[index] for index in pair], [SIZES[index] for index in pair])
        for index in pair:
            got = bn_of(strategy, nodes, index)
            assert distance(got, {name: expected[name] for name in got}) < 1e-12


def bn_of(strategy: FedNorm, nodes: Federation, index: int) -> state.State:
    """Return the BN entries that a node would get next."""
    sent = state.from_record(
        strategy.package([1000 + index], nodes.initial)[1000 + index]["arrays"]
    )
    return {name: sent[name] for name in bn_entries(make_model(), EVERYTHING)}


def test_the_personal_mean_is_that_of_the_domains() -> None:
    nodes, strategy = Federation(make_model()), FedNorm()
    assert strategy.state.personal == {}
    nodes.run(strategy, 1)
    each = [bn_of(strategy, nodes, index) for index in range(4)]
    for name, value in strategy.state.personal.items():
        if name.endswith("num_batches_tracked"):
            continue
        np.testing.assert_allclose(value, sum(own[name].numpy() for own in each) / 4, rtol=1e-12)
    assert set(strategy.state.personal) == set(bn_entries(make_model(), EVERYTHING))


def test_a_node_without_a_domain_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    nodes, strategy = Federation(make_model()), FedNorm()
    domains = nodes.split.domains
    assert domains is not None
    domains[:3] = 3  # the first node now holds samples of two domains
    nodes.run(strategy, 1)
    assert "Node 1000 is left out of this round: FedNorm needs one domain a node" in caplog.text
    domains[::2] = 0
    domains[1::2] = 1
    with pytest.raises(
        CannotTrainError, match="node 1000: FedNorm needs one domain a node, and this one names"
    ):
        nodes.run(FedNorm(), 1)


class SiloNorm(SiloBN, FedNorm):
    """Statistics stay on the nodes, and affine parameters are averaged within domains."""

    state: Any


def test_where_a_part_of_bn_stays_nodes_still_get_the_rest_of_their_domain() -> None:
    nodes, strategy = Federation(make_model()), SiloNorm(fraction_evaluate=0.0)
    end = nodes.run(strategy, 1)
    assert set(strategy.state.served) == {1000, 1001, 1002, 1003}
    for index in range(4):
        sent = state.from_record(
            strategy.package([1000 + index], nodes.initial)[1000 + index]["arrays"]
        )
        own = strategy.training.replies[index].arrays
        assert all(np.array_equal(sent[name].numpy(), own[name]) for name in AFFINE)
        assert not state.group_keys(nodes.model, "statistics") & sent.keys()
    # the global model has the mean under the nodes' weights, and not that of the domains
    wanted = weighted_mean([state_of(reply) for reply in strategy.training.replies], SIZES)
    assert (
        distance({name: end[name] for name in AFFINE}, {name: wanted[name] for name in AFFINE})
        < 1e-12
    )


AFFINE = sorted(state.group_keys(make_model(), "affine"))


def state_of(reply: NodeReply) -> state.State:
    return {name: torch.from_numpy(np.array(value)) for name, value in reply.arrays.items()}
