"""Nodes that fail in the middle of a layer-wise step: the round is that of the other nodes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode

from fedbn_flwr import state, wire
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import CannotTrainError, FedTAN
from fedbn_flwr.transports import message_records as layerwise_wire
from fedbn_flwr.transports.counting_grid import CountingGrid
from fedbn_flwr.transports.message_client import STEPS
from fedbn_flwr.transports.message_records import StepPosition
from tests.helpers.faults import FAULTY, Fault, Faulty, Without, elsewhere, lies, silent, too_large
from tests.helpers.harness import Federation, make_model

#: exchanges of an iteration with two BN layers
LAST = 4


def raises(reply: Message) -> Message:
    error = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "killed"), reply_to=_asked(reply))
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return error


def _asked(reply: Message) -> Message:
    question = Message(
        reply.content, dst_node_id=reply.metadata.src_node_id, message_type=wire.LAYERWISE
    )
    question.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return question


def unreadable(reply: Message) -> Message:
    reply.content[layerwise_wire.REQUEST] = ArrayRecord()
    return reply


FAULTS: dict[str, tuple[Fault, str]] = {
    "raises": (raises, "killed"),
    "is silent": (silent, "did not answer in time"),
    "says no number": (lies(lambda values: values * np.nan), "is not finite"),
    "says a number that is too large": (lies(too_large), "is too large to be pooled"),
    "says another shape": (
        lies(lambda values: np.concatenate([values, values])),
        "(4, 4)|(8, )|shape",
    ),
    "is at another layer": (elsewhere, "another"),
    "cannot be understood": (unreadable, "cannot be read"),
}


def faulty(what: Fault, at: int, where: int = FAULTY, when: Iterable[int] = (1,)) -> type[Faulty]:
    class Grid(Faulty):
        node, index, fault, rounds = where, at, staticmethod(what), when

    return Grid


def federation(grid: type[InProcessGrid] = InProcessGrid) -> Federation:
    return Federation(make_model(), grid=grid)


@pytest.fixture(autouse=True)
def _nothing_held() -> None:
    STEPS.clear()


def strategy(**options: Any) -> FedTAN:
    return FedTAN(exchange_timeout=0.05, **options)


@pytest.fixture(scope="module")
def survivors() -> state.State:
    return federation(Without).run(strategy(), 2)


@pytest.mark.parametrize(
    ("case", "index"),
    [
        *((case, number % LAST) for number, case in enumerate(FAULTS)),
        *(("raises", index) for index in range(1, LAST)),
    ],
)
@pytest.mark.sampled(5)
def test_a_fault_at_any_exchange_leaves_the_round_to_the_others(
    case: str, index: int, survivors: state.State, caplog: pytest.LogCaptureFixture
) -> None:
    fault, said = FAULTS[case]
    after = federation(faulty(fault, index, when=(1, 2))).run(strategy(), 2)
    assert all(torch.equal(after[name], survivors[name]) for name in after)
    named = [text for text in caplog.messages if "is left out of this round" in text]
    assert len(named) == 2
    assert all(
        "Node 1001 " in text and any(part in text for part in said.split("|")) for text in named
    )
    assert not STEPS


@pytest.mark.parametrize(
    "case", ["raises", "is silent", "says no number", "says another shape", "is at another layer"]
)
def test_a_fault_at_the_last_exchange_costs_the_node_its_vote(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = federation(faulty(FAULTS[case][0], LAST))
    grid = CountingGrid(nodes.grid)
    talk = strategy()
    after = nodes.run(talk, 1, grid=grid)
    # its statistics had their share, and nothing started again
    assert grid.training.exchanges == LAST + 1
    assert [reply.node for reply in talk.training.replies] == [1000, 1002, 1003]
    assert any("Node 1001 is left out of this round" in text for text in caplog.messages)
    assert all(torch.isfinite(value).all() for value in after.values())


def test_several_nodes_may_fail_at_once_and_one_after_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Grid(Faulty):
        def due(self, node: int, turn: StepPosition) -> bool:
            return (node, turn.attempt, turn.index) in {(1000, 1, 1), (1003, 1, 1), (1001, 2, 3)}

    talk = strategy()
    federation(Grid).run(talk, 2)
    assert sorted(text.split()[1] for text in caplog.messages if "did not answer" in text) == [
        "1000",
        "1001",
        "1003",
    ]
    # the next round has all nodes again
    assert len(talk.training.replies) == 4


def test_after_so_many_attempts_the_round_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    class Grid(Faulty):
        rounds = (2, 3)

        def due(self, node: int, turn: StepPosition) -> bool:
            return (node, turn.attempt, turn.index) in {(1000, 1, 2), (1001, 2, 2), (1002, 3, 2)}

    nodes = federation(Grid)
    first = federation().run(strategy(), 1)
    after = nodes.run(strategy(), 3)
    assert all(torch.equal(after[name], first[name]) for name in after)
    skipped = [text for text in caplog.messages if "is skipped" in text]
    words = " is skipped after attempt 3 at its layer-wise step"
    assert skipped == ["Round 2" + words, "Round 3" + words]
    silent = [text for text in caplog.messages if "did not answer in time" in text]
    assert silent.count("Node 1002 is left out of this round: it did not answer in time") == 2
    # the steps of earlier attempts end as soon as another one begins
    assert {held.place[0] for held in STEPS.values()} == {"3.3"}


def test_without_any_round_the_first_reason_is_said() -> None:
    class Grid(Faulty):
        fault = staticmethod(raises)

        def due(self, node: int, turn: StepPosition) -> bool:
            return True

    with pytest.raises(
        CannotTrainError, match="no node could train in round 1: node 1000: it failed: killed"
    ):
        federation(Grid).run(strategy(), 1)
