"""Who takes part: the same nodes are drawn however late their answers are.

Silent ones are drawn by their ids.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import resolve
from fedbn_flwr.randomness import numpy_generator
from fedbn_flwr.server.sampling import Roster, draw_described
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid
from fedbn_flwr.wire import DESCRIBE
from tests.helpers.faults import FaultyReply
from tests.helpers.toys import toy_cnn, toy_split

NODES = 6


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("fedbn_flwr.server.grids.time", clock)
    return clock


class LateGrid(InProcessGrid):
    """Holds back what some nodes say of themselves until a time.

    Node ids run against the partitions, as at random.
    """

    clock: Clock
    late: Iterable[int] = ()
    until = 0.0

    def __init__(self, app: ClientApp, num_nodes: int) -> None:
        super().__init__(app, num_nodes)
        self._nodes = self._nodes[::-1]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [
            one for one in message_ids if self.clock.now >= self.until or not self.held_back(one)
        ]
        return super().pull_messages(ready)

    def held_back(self, message_id: str) -> bool:
        reply = self._replies.get(message_id)
        return reply is not None and reply.metadata.src_node_id in self.late


def client(context: Context) -> BNClient:
    return BNClient(toy_cnn(), toy_split(), partition_id=int(context.node_config["partition-id"]))


@pytest.fixture
def grid(clock: Clock) -> LateGrid:
    grid = LateGrid(client_app(client), NODES)
    grid.clock = clock
    return grid


def partitions_drawn(grid: InProcessGrid, timeout: float) -> list[Any]:
    """The partitions that take part in three rounds, half of them in each, in a run with a time
    limit.
    """
    options = {"clients": NODES, "fraction-train": 0.5, "timeout": timeout}
    strategy = resolve(options).make_strategy(NODES)
    drawn = [strategy.draw_nodes(grid, server_round, 0.5, 1) for server_round in (1, 2, 3)]
    return [grid.context(node).node_config["partition-id"] for nodes in drawn for node in nodes]


def test_the_draw_does_not_depend_on_how_late_nodes_answer(grid: LateGrid, clock: Clock) -> None:
    in_time = partitions_drawn(InProcessGrid(client_app(client), NODES), timeout=3600.0)
    grid.late, grid.until = (FIRST_NODE_ID, FIRST_NODE_ID + 3), 3000.0
    assert partitions_drawn(grid, timeout=3600.0) == in_time
    assert clock.now >= 3000.0


def test_nodes_that_never_answer_are_named_and_drawn_by_id(
    grid: LateGrid, clock: Clock, flower_log: pytest.LogCaptureFixture
) -> None:
    grid.late, grid.until = (FIRST_NODE_ID, FIRST_NODE_ID + 3), float("inf")
    drawn = partitions_drawn(grid, timeout=40.0)
    assert 40.0 <= clock.now <= 42.0
    assert (
        "Nodes 1000, 1003 are drawn by id, without a description: no answer in 40 seconds"
        in flower_log.text
    )
    # they come last in the order, in which all are drawn in the places that a generator of the
    # round draws
    places = [
        numpy_generator(0, "sampling", number).choice(NODES, 3, replace=False)
        for number in (1, 2, 3)
    ]
    order = [0, 1, 3, 4, 5, 2]
    assert drawn == [order[place] for row in places for place in sorted(row)]


class LosingGrid(FaultyReply):
    """Answers in the place of one node, as Flower does when a node is gone."""

    node, message_type, code = FIRST_NODE_ID + 2, DESCRIBE, ErrorCode.NODE_UNAVAILABLE

    def spoiled(self, message: Message, _: Message) -> Message:
        return Message(Error(self.code, "the node is gone"), reply_to=message)


@pytest.mark.parametrize(
    "code", [ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.UNKNOWN]
)
def test_a_node_that_was_lost_has_not_said_who_it_is(
    code: int, monkeypatch: pytest.MonkeyPatch, flower_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LosingGrid, "code", code)
    assert len(partitions_drawn(LosingGrid(client_app(client), NODES), timeout=3600.0)) == 9
    assert "Node 1002 is drawn by id, without a description: the node is gone" in flower_log.text


def test_apps_without_an_answer_are_drawn_by_their_ids(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    nodes = Roster(1.0).describe(
        InProcessGrid(ClientApp(), NODES), [FIRST_NODE_ID, FIRST_NODE_ID + 1]
    )
    assert {node: item.partition for node, item in nodes.items()} == {1000: 1000, 1001: 1001}
    assert draw_described(nodes, 2, seed=0, server_round=1) == [1000, 1001]
    assert "Nodes 1000, 1001 are drawn by id, without a description: " in flower_log.text
