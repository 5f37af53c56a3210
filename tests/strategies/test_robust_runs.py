"""Runs with a lying client: under a rule, nothing that the method pools grows with the lie."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedbn_flwr import state, wire
from fedbn_flwr.strategies import (
    HBN,
    CannotTrainError,
    FedAvg,
    FedBN,
    FedDNA,
    FedTAN,
    FixBN,
    HeteroFL,
    Scaffold,
    Standalone,
)
from tests.helpers.faults import Fault, FaultyReply, failed, infinite, silent, spoiling
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.liar import LyingGrid

#: five clients, as Krum needs; the first one lies
SIZES = (7, 12, 20, 5, 9)
RULES = ("trimmed:0.2", "multi-krum:1", "norm:1.5")
#: by name, a strategy and the normalizer of its model
METHODS: dict[str, tuple[Callable[..., FedAvg], str]] = {
    "fedavg": (FedAvg, "bn"),
    "adam on the server": (lambda **options: FedAvg(server_optimizer="adam", **options), "bn"),
    "fedbn": (lambda **options: FedBN(mean_personal=True, **options), "bn"),
    "fixbn": (lambda **options: FixBN(freeze_round=2, **options), "bn"),
    "fedtan": (FedTAN, "bn"),
    "fedtan, paper": (lambda **options: FedTAN(exchange="paper", **options), "bn"),
    "carried": (lambda **options: FedTAN(carry=True, **options), "bn"),
    "feddna": (FedDNA, "bn"),
    "scaffold": (Scaffold, "bn"),
    "hbn": (HBN, "hbn"),
    "heterofl": (HeteroFL, "static-bn"),
}


def run(method: str, lie: float = 1.0, **options: Any) -> state.State:
    """Return the end of a run."""
    make, kind = METHODS[method]
    nodes = Federation(make_model(kind), SIZES)
    return nodes.run(make(**options), 3, LyingGrid(nodes.grid, lie))


@pytest.mark.parametrize("method", ["fedavg", "fedtan", "scaffold", "hbn"])
def test_without_a_rule_the_model_grows_with_the_lie(method: str) -> None:
    assert distance(run(method), run(method, 1e6)) > 1


@pytest.mark.parametrize(
    ("method", "rule"),
    [*((method, "median") for method in METHODS), *(("fedtan", rule) for rule in RULES)],
)
@pytest.mark.sampled(3)
def test_under_a_rule_the_lie_can_be_as_large_as_it_likes(method: str, rule: str) -> None:
    """The largest and the second largest lie come to the same end: only their order counts, or
    their direction.
    """
    assert distance(run(method, 1e6, robust=rule), run(method, 1e7, robust=rule)) < 1e-4


@pytest.mark.parametrize("make", [FedAvg, FedTAN, lambda **options: FedTAN(carry=True, **options)])
@pytest.mark.parametrize(
    ("rule", "sizes", "missing"),
    [("multi-krum:1", SIZES, "5 nodes, and has 4: 1"), ("median", (7, 9), "3.*1: 2")],
)
def test_with_too_few_replies_the_run_says_which_rule_needs_how_many_more(
    make: Callable[..., FedAvg], rule: str, sizes: tuple[int, ...], missing: str
) -> None:
    """Not that training has diverged, as the node's infinite numbers may."""
    nodes = Federation(
        make_model(), sizes, grid=spoiling(infinite, lambda partition, _: partition == 1)
    )
    with pytest.raises(CannotTrainError) as error:
        nodes.run(make(robust=rule), 1)
    found = f"no node could train in round 1: robust={rule} needs models of {missing} missing"
    assert re.fullmatch(found, str(error.value))


def test_a_round_with_too_few_replies_leaves_the_model_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    later = spoiling(infinite, lambda partition, number: partition == 1 and number > 1)
    nodes = Federation(make_model(), SIZES, grid=later)
    with caplog.at_level(logging.WARNING):
        ends = [nodes.run(FedAvg(robust="multi-krum:1"), rounds) for rounds in (1, 3)]
    assert distance(*ends) == 0
    for number in (2, 3):
        assert (
            f"Round {number}: robust=multi-krum:1 needs models of 5 nodes, and has 4: 1 missing"
            in caplog.messages
        )


def test_a_step_does_not_start_again_with_fewer_nodes_than_a_rule_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = Federation(
        make_model(), SIZES, grid=spoiling(failed, lambda node, number: (node, number) == (1, 2))
    )
    ends = [nodes.run(FedTAN(robust="multi-krum:1"), rounds) for rounds in (1, 2)]
    assert distance(*ends) == 0
    assert "Round 2 is skipped after attempt 1 at its layer-wise step" in caplog.messages


def test_one_silent_node_does_not_end_a_run_at_its_freeze() -> None:
    """The others have acknowledged what this round is the first to ask for."""
    nodes = Federation(
        make_model(),
        SIZES[:3],
        grid=spoiling(failed, lambda node, number: (node, number) == (1, 3)),
    )
    strategy = FixBN(freeze_round=2, robust="median")
    nodes.run(strategy, 4)
    assert len(strategy.training.replies) == 3


def without_moments(reply: Message) -> Message:
    del reply.content[wire.MOMENTS]
    return reply


@pytest.mark.parametrize(("make", "kind"), [(HBN, "hbn"), (HeteroFL, "static-bn")])
@pytest.mark.parametrize("fault", [silent, without_moments])
@pytest.mark.parametrize(("rule", "gathers"), [("multi-krum:1", False), ("median", True)])
def test_statistics_of_fewer_nodes_than_a_rule_needs_are_not_gathered(
    make: Callable[..., FedAvg],
    kind: str,
    fault: Fault,
    rule: str,
    gathers: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = {"message_type": wire.GATHER, "fault": staticmethod(fault)}
    nodes = Federation(make_model(kind), SIZES, grid=type("Gathering", (FaultyReply,), members))
    initial, after = (
        make_model(kind).state_dict(),
        nodes.run(make(robust=rule, exchange_timeout=0.1), 2),
    )
    statistics = [name for name in initial if name.endswith(("running_mean", "running_var"))]
    assert [torch.equal(after[name], initial[name]) for name in statistics] == [not gathers] * 4
    said = "Round 2: robust=multi-krum:1 needs gathered statistics of 5 nodes, and has 4: 1 missing"
    assert (said in caplog.messages) != gathers
    assert ("BN statistics stay as they were" in caplog.text) != gathers


@pytest.mark.parametrize(("rule", "is_mean"), [("multi-krum:1", False), ("median", True)])
def test_kept_entries_of_fewer_nodes_than_a_rule_needs_are_not_averaged(
    rule: str, is_mean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    members = {
        "message_type": "evaluate",
        "spoiled": lambda _, message, reply: failed(message, reply),
    }
    strategy = FedBN(mean_personal=True, robust=rule)
    Federation(make_model(), SIZES, grid=type("Failing", (FaultyReply,), members)).run(strategy, 2)
    assert bool(strategy.state.personal) == is_mean
    said = f"Round 2: robust={rule} needs kept entries of 5 nodes, and has 4: 1 missing"
    assert (said in caplog.messages) != is_mean


def test_a_rule_has_nothing_to_do_where_nothing_is_shared() -> None:
    ends = [
        Federation(make_model(), SIZES).run(Standalone(robust=rule), 1) for rule in ("none", *RULES)
    ]
    assert [distance(end, ends[0]) for end in ends] == [0.0] * 4


def test_without_mean_personal_no_rule_misses_kept_entries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Federation(make_model(), SIZES).run(FedBN(robust="multi-krum:1"), 2)
    assert "missing" not in caplog.text
