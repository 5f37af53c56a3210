"""Nodes that fail in the middle of a layer-wise step on Flower's Ray simulation, and workers that are killed there."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedbn_flwr import state, wire
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.simulation.node_contexts import FIRST_NODE_ID
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.traffic.counting_grid import CountingGrid
from fedbn_flwr.transports.message_records import StepPosition
from fedbn_flwr.transports.nodes_transport import Participant
from tests.helpers.faults import Fault, Faulty, Without, elsewhere, lies
from tests.helpers.harness import SIZES, Federation
from tests.helpers.process_per_message import dropout_model, make_client
from tests.helpers.ray_cluster import Cluster
from tests.helpers.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

EVERYONE = set(range(len(SIZES)))
#: the last exchange of a step with two BN layers
LAST = 4


def raises(_: Message) -> None:
    raise RuntimeError("out of luck")


def late(run_is_over: Path, reply: Message) -> Message:
    wait_until(run_is_over.exists)
    return reply


def killed(_: Message) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


#: by round, what the node with partition 1 does, and at which exchange
Faults = Mapping[int, tuple[Fault, int]]


class FaultyApp(ClientApp):
    """A ClientApp in which one node does not answer as it should."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def __call__(self, message: Message, context: Context) -> Message:
        reply = client_app(make_client)(message, context)
        if message.metadata.message_type != wire.LAYERWISE or context.node_config["partition-id"] != 1:
            return reply
        server_round, turn = when(message)
        fault, index = self._faults.get(server_round, (None, 0))
        if fault is None or (turn.phase, turn.index) != ("exchange", index):
            return reply
        spoilt = fault(reply)
        assert spoilt is not None
        return spoilt


def when(message: Message) -> tuple[int, StepPosition]:
    """The round of a layer-wise message, and where in its step it belongs."""
    return int(str(message.content.config_records[wire.CONFIG]["server-round"])), StepPosition.of(message.content)


class Noting(FedTAN):
    """Notes the partitions that took the layer-wise step of each round, and those whose models were averaged."""

    def __init__(self) -> None:
        super().__init__(
            patience=PATIENCE,
            exchange_timeout=PATIENCE,
            min_available_nodes=len(SIZES),
            min_train_nodes=1,
            fraction_evaluate=0.0,
        )
        self.stepping: dict[int, set[int]] = {}
        self.voting: dict[int, set[int]] = {}
        #: the model after each round that brought one
        self.models: dict[int, state.State] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        self.stepping[server_round], self.voting[server_round] = set(), set()
        return super().configure_train(server_round, arrays, config, grid)

    def weigh_participants(self, participants: Iterable[Participant]) -> list[float]:
        participants = list(participants)
        # the last attempt counts
        self.stepping[self.server_round] = {participant.partition for participant in participants}
        return super().weigh_participants(participants)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(server_round, replies)
        self.voting[server_round] = {reply.partition for reply in self.train_replies}
        if result[0] is None:
            self.stepping[server_round] = set()
        else:
            self.models[server_round] = state.from_record(result[0])
        return result


class Watched(CountingGrid):
    """A grid that calls `before` with the messages it is about to send, and `waiting` with those it waits for."""

    before: Callable[[Sequence[Message]], None]
    waiting: Callable[[Sequence[Message]], None]

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.sent: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.before(messages)
        ids = list(super().push_messages(messages))
        self.sent |= dict(zip(ids, messages, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        message_ids = list(message_ids)
        self.waiting([self.sent[one] for one in message_ids])
        return super().pull_messages(message_ids)


def ignore(_: Sequence[Message]) -> None:
    pass


def on_ray(
    cluster: Cluster,
    strategy: Noting,
    rounds: int,
    faults: Faults | None = None,
    *,
    before: Callable[[Sequence[Message]], None] = ignore,
    waiting: Callable[[Sequence[Message]], None] = ignore,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Train with two workers; `at_end` is called while they still run."""
    server, nodes = ServerApp(), Federation(dropout_model())

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # both workers are at work before the first exchange
        strategy.describe(grid, list(grid.get_node_ids()))
        watched = Watched(grid)
        watched.before, watched.waiting = before, waiting
        try:
            nodes.run(strategy, rounds, grid=watched)
        finally:
            at_end()

    resources: Any = {
        "init_args": {"address": cluster.address},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, FaultyApp(faults or {}), num_supernodes=len(SIZES), backend_config=resources)


def left_out(texts: list[str]) -> list[str]:
    return [text for text in texts if "is left out of this round" in text]


def assert_same(found: state.State, wanted: state.State) -> None:
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def check_without_the_node(strategy: Noting, rounds: int) -> None:
    """The first rounds were those of a federation that the node never joined."""
    for server_round in range(1, rounds + 1):
        assert strategy.voting[server_round] == EVERYONE - {1}
    assert_same(strategy.models[rounds], Federation(dropout_model(), grid=Without).run(FedTAN(), rounds))


def test_faults_and_then_the_death_of_a_worker(joined: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """One after the other, because Ray takes long to start."""
    strategy = Noting()
    faults: Faults = {
        1: (raises, 1),
        2: (lies(lambda values: values * np.nan), 2),
        3: (elsewhere, 3),
        5: (killed, 2),
    }
    on_ray(joined, strategy, 6, faults)
    for text, said in zip(left_out(caplog.messages), ["out of luck", "is not finite", "another"], strict=False):
        assert said in text
    check_without_the_node(strategy, 3)
    # the node is back
    assert strategy.voting[4] == EVERYONE
    check_after_a_death(strategy, 5, caplog.messages)


class Clock:
    """The machine's clock, which a test can set ahead."""

    def __init__(self) -> None:
        self.ahead, self.sleep = 0.0, time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_a_late_answer_leaves_the_round_to_the_others(
    joined: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, clock = Noting(), Clock()
    monkeypatch.setattr("fedbn_flwr.server.ask_nodes.time", clock)

    def give_up(messages: Sequence[Message]) -> None:
        """Set the clock ahead when all others have answered the exchange in which the node is late."""
        if len(messages) == 1 and messages[0].metadata.message_type == wire.LAYERWISE and not clock.ahead:
            late_one = strategy.describe_node(messages[0].metadata.dst_node_id).partition == 1
            if late_one and when(messages[0])[1].index == 2:
                clock.ahead = 2 * PATIENCE

    over = tmp_path / "over"
    on_ray(joined, strategy, 1, {1: (partial(late, over), 2)}, waiting=give_up, at_end=over.touch)
    assert ["did not answer in time" in text for text in left_out(caplog.messages)] == [True]
    check_without_the_node(strategy, 1)


def test_a_worker_killed_between_two_exchanges(joined: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    victims: list[int] = []

    def kill(messages: Sequence[Message]) -> None:
        for message in messages:
            if message.metadata.message_type == wire.LAYERWISE and not victims:
                server_round, turn = when(message)
                if (server_round, turn.index) == (2, 2):
                    victims.append(joined.workers()[0])
                    os.kill(victims[0], signal.SIGKILL)

    strategy = Noting()
    on_ray(joined, strategy, 4, before=kill)
    assert len(victims) == 1
    assert strategy.voting[1] == EVERYONE
    check_after_a_death(strategy, 2, caplog.messages)


def check_after_a_death(strategy: Noting, server_round: int, texts: list[str]) -> None:
    """A worker died in this round: steps were taken whole or not at all, and what went wrong is said.

    Flower's pool of workers does not notice, and later messages that go to the dead one fail, whichever nodes they are
    for. So rounds are left to the nodes whose messages went to the other worker, and to nobody if there are none.
    """
    assert strategy.voting[server_round] < EVERYONE
    assert any("ActorDiedError" in text for text in left_out(texts))
    for skipped in strategy.voting.keys() - strategy.models.keys():
        assert any(text.startswith(f"Round {skipped} ") for text in texts)
    assert_same(strategy.models[max(strategy.models)], as_noted(strategy))


def as_noted(strategy: Noting) -> state.State:
    """The same rounds in one process, of the nodes that took part, from beginning to end."""

    class Again(FedTAN):
        def draw_nodes(self, *_: Any) -> list[int]:
            return [FIRST_NODE_ID + partition for partition in sorted(strategy.stepping[self.server_round])]

    class Losing(Faulty):
        """Who took the step and has no vote was lost at the last exchange."""

        def spoils(self, message: Message) -> bool:
            server_round, turn = when(message)
            lost = strategy.stepping[server_round] - strategy.voting[server_round]
            return turn.index == LAST and message.metadata.dst_node_id - FIRST_NODE_ID in lost

    nodes = Federation(dropout_model(), grid=Losing)
    return nodes.run(Again(exchange_timeout=0.05, fraction_evaluate=0.0), len(strategy.voting))
