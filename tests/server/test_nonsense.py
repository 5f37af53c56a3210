"""One node of four sends nonsense, of every kind: the run goes on, and the log names the node."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedBN, FedNorm, FedTAN, Scaffold
from fedbn_flwr.transports.counting_grid import CountingGrid
from tests.helpers.harness import Federation
from tests.helpers.nonsense import (
    BAD,
    DESCRIPTIONS,
    HARMLESS,
    NONSENSE,
    VARIATES,
    AbsentNode,
    BadNode,
    sends,
)

METHODS: dict[str, Callable[[], BaseStrategy]] = {
    "fedavg": partial(FedAvg, exchange_timeout=0.1),
    "fedbn": partial(FedBN, exchange_timeout=0.1),
    "fedtan": partial(FedTAN, exchange_timeout=0.1),
    "fednorm": partial(FedNorm, exchange_timeout=0.1),
    "scaffold": partial(Scaffold, exchange_timeout=0.1),
}
#: the others read replies as FedAvg does
EACH = [
    pytest.param(name, marks=() if name in ("fedavg", "fedtan") else pytest.mark.slow)
    for name in METHODS
]
#: strategies that ask nodes to describe themselves
ASKING: dict[str, Callable[[], BaseStrategy]] = {
    "fednorm": FedNorm,
    "scaffold": partial(Scaffold, fraction_train=0.75),
}


def run(strategy: BaseStrategy, grid: type[BadNode], rounds: int = 2) -> state.State:
    """Run a small federation, with evaluations; the grid is counted as in an experiment."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nodes = Federation(
            nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)), grid=grid
        )
    return nodes.run(strategy, rounds, grid=CountingGrid(nodes.grid), local_steps=1)


@cache
def without(method: str) -> state.State:
    """Return the model of a run in which the node fails in every round."""
    return run(METHODS[method](), AbsentNode)


def names_the_node(log: pytest.LogCaptureFixture) -> bool:
    return any(str(BAD) in text for text in log.messages)


#: what FedTAN's server hears only at the end of a step, in which the node had its share
AT_THE_END = ("a list of losses", "no losses in a list")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(
            pytest.param(kind, *method.values, marks=method.marks)
            for kind in NONSENSE
            for method in EACH
        ),
        *((kind, "scaffold") for kind in VARIATES),
    ],
)
@pytest.mark.sampled(30)
def test_nonsense_is_refused_by_name(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = without(method)
    caplog.clear()
    after = run(METHODS[method](), sends((NONSENSE | VARIATES)[kind]))
    assert names_the_node(caplog)
    same = all(torch.equal(after[name], wanted[name]) for name in wanted)
    assert same or (method == "fedtan" and kind in AT_THE_END)


@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.sampled(20)
def test_the_run_goes_on_with_what_is_odd(kind: str, method: str) -> None:
    after = run(METHODS[method](), sends(HARMLESS[kind]))
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.parametrize("method", ASKING)
@pytest.mark.parametrize("kind", DESCRIPTIONS)
@pytest.mark.sampled(26)
def test_a_node_that_describes_itself_as_nonsense_is_named(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    after = run(ASKING[method](), sends(DESCRIPTIONS[kind], True))
    assert names_the_node(caplog)
    assert all(value.isfinite().all() for value in after.values())


def test_a_client_that_obeys_nothing_is_left_out_while_others_obey(
    caplog: pytest.LogCaptureFixture,
) -> None:
    after = run(METHODS["fedbn"](), sends(lambda content: content.pop(wire.REPORT)))
    assert all(torch.equal(after[name], value) for name, value in without("fedbn").items())
    assert any(
        f"Node {BAD} is left out of this round: it did not acknowledge stays" in text
        for text in caplog.messages
    )
