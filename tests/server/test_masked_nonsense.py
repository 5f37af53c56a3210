"""Under masks, one node of six sends nonsense, of every kind: the run goes on, and the log names this node only."""

import re
from collections.abc import Callable
from functools import cache, partial
from logging import WARNING
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from fedbn_flwr import state
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedBS, FedTAN, FixBN, Scaffold
from fedbn_flwr.wire import masked
from tests.helpers.harness import Federation
from tests.helpers.masked_nonsense import (
    KEYS,
    LIES,
    OPENINGS,
    REPLIES,
    SHARES,
    UNKNOWN,
    UNOPENABLE,
    fails,
    said,
    sends_masked,
)
from tests.helpers.nonsense import BAD

#: five nodes are enough for sums of six; each has other mini-batches, if a step begins again
SIX = (7, 12, 20, 6, 9, 8)
OPTIONS: dict[str, Any] = {"secure": True, "exchange_timeout": 0.1}
METHODS: dict[str, Callable[[], BaseStrategy]] = {
    "fedavg": partial(FedAvg, **OPTIONS),
    "fixbn": partial(FixBN, freeze_round=1, **OPTIONS),
    "fedbs": partial(FedBS, **OPTIONS),
    "fedtan": partial(FedTAN, **OPTIONS),
    "scaffold": partial(Scaffold, **OPTIONS),
}
#: all of them together take minutes
EACH = [pytest.param(name, marks=[] if name in ("fedavg", "fedtan") else pytest.mark.slow) for name in METHODS]


def run(method: str, grid: type[InProcessGrid] = InProcessGrid, rounds: int = 2) -> state.State:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nodes = Federation(nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)), SIX, grid=grid)
    return nodes.run(METHODS[method](), rounds, evaluate_every=1, local_steps=1)


@cache
def after(method: str, place: str = "", rounds: int = 2) -> state.State:
    """Return the model of a run in which the node fails at a place of the protocol, in every round."""
    return run(method, sends_masked(fails("absent"), place), rounds)


def named(log: pytest.LogCaptureFixture) -> set[int]:
    """Return the nodes in the log, but for those whose sum was not opened for another one's fault."""
    said = [record.getMessage() for record in log.records if record.levelno >= WARNING]
    texts = [text for text in said if "the sum that it is in was not opened" not in text]
    assert not [text for text in texts if str(BAD) in text and not text.isprintable()]
    return {int(node) for text in texts for node in re.findall(r"\b100\d\b", text)}


def same(one: state.State, other: state.State, method: str) -> bool:
    """Compare two models; after an exchange that failed, nodes draw mini-batches that only they know."""
    return method == "fedtan" or all(torch.equal(one[name], other[name]) for name in other)


CASES = [
    *(("reply", kind, change) for kind, change in REPLIES.items()),
    *(("reply", kind, change) for kind, change in SHARES.items()),
    *(("key", kind, change) for kind, change in KEYS.items()),
]


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize(("place", "kind", "change"), CASES, ids=[f"{place}-{kind}" for place, kind, _ in CASES])
def test_nonsense_is_refused_by_name(
    place: str, kind: str, change: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = after(method, place)
    caplog.clear()
    found = run(method, sends_masked(change, place))
    assert named(caplog) == {BAD}
    assert same(found, wanted, method)


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("kind", OPENINGS)
def test_a_node_that_does_not_help_to_open_a_sum_is_named(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = after(method)
    caplog.clear()
    found = run(method, sends_masked(OPENINGS[kind], "opening"))
    assert named(caplog) == {BAD}
    assert same(found, wanted, method)


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("kind", UNOPENABLE)
def test_a_node_whose_mask_cannot_be_opened_is_named_and_costs_the_round(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = after(method)
    caplog.clear()
    found = run(method, sends_masked(UNOPENABLE[kind], since_round=3), 4)
    assert named(caplog) == {BAD}
    assert same(found, wanted, method)


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_numbers_that_are_none_cost_the_round_and_all_its_nodes_are_named(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = after(method)
    caplog.clear()
    found = run(method, sends_masked(UNKNOWN[kind], since_round=3), 4)
    assert named(caplog) == {1000, 1001, 1002, 1003, 1004, 1005}
    assert same(found, wanted, method)


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("kind", LIES)
def test_no_lie_under_masks_ends_the_run(kind: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    found = run(method, sends_masked(LIES[kind], since_round=3), 4)
    assert named(caplog) in (set(), {1000, 1001, 1002, 1003, 1004, 1005})
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("key", ["shares", "commitments"])
def test_where_one_share_is_wrong_its_owner_and_its_holder_are_named(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can know which of them lies; and the sum is opened by the others."""
    wanted = after("fedavg")
    caplog.clear()
    found = run("fedavg", sends_masked(said(key, lambda all_shares: [b"", *all_shares[1:]])))
    assert named(caplog) == {1000, BAD}
    assert same(found, wanted, "fedavg")


def test_of_two_nodes_with_one_key_the_second_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    keys = list[Any]()

    class Thief(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in filter(Message.has_content, replies):
                record: Any = reply.content.config_records.get(masked.MASKED, {})
                keys.append(record.get("key", b""))
                if reply.metadata.src_node_id == BAD and "key" in record:
                    reply.content[masked.MASKED] = ConfigRecord({**record, "key": keys[0]})
            return replies

    run("fedavg", Thief)
    assert "Node 1001 is left out of this round: it failed: its key is another node's, too" in caplog.messages
