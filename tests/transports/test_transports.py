"""Layer-wise steps that workers share: who pools, and steps that one process cannot open or go on
with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import state, wire
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.layerwise import Answer, Requests, take_step
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid
from fedbn_flwr.simulation.processes.pipe import ObjectPipe
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid, WorkersTransport
from fedbn_flwr.simulation.processes.service import Service
from fedbn_flwr.simulation.processes.worker import OwnShare, WorkerError
from fedbn_flwr.simulation.stacked.stacked_grid import StackedTransport
from fedbn_flwr.transports import NodesTransport, Participant
from fedbn_flwr.transports.counting_grid import CountingGrid
from fedbn_flwr.transports.message_records import StepPosition
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, make_model

ASKED = replace(INSTRUCTION, server_round=1, local_steps=1, layerwise="fused")


def stacked_nodes(partitions: Sequence[int]) -> StackedGrid:
    """Some nodes of the harness's federation, stacked."""
    app = client_app(Federation(make_model()).client)
    return StackedGrid(app, len(SIZES), partitions=partitions)


def contents() -> dict[int, RecordDict]:
    arrays = state.to_record(make_model().state_dict())
    return {
        1000 + index: RecordDict({"arrays": arrays, wire.CONFIG: ASKED.to_config()})
        for index in range(len(SIZES))
    }


def asked() -> list[Message]:
    """Return the messages that open a step; their order is not that of the participants."""
    position = StepPosition(1).pack()
    return [
        Message(RecordDict({**content, **position}), node, wire.LAYERWISE)
        for node, content in reversed(contents().items())
    ]


def opened(grid: Grid) -> tuple[CountingGrid, NodesTransport]:
    counting = CountingGrid(grid)
    step = counting.open_step(asked())
    assert step is not None
    return counting, step


def test_nodes_of_a_worker_are_one_row_once_it_knows_their_weights() -> None:
    seen: list[Requests] = []
    with WorkersGrid(stacked_nodes, len(SIZES), 2, start=OwnShare) as grid:
        _, step = opened(grid)
        take_step(
            step,
            lambda: [participant.num_examples for participant in step.participants],
            seen.append,
        )
    assert [len(requests.tensor) for requests in seen] == [4, 2, 2, 2]


def test_plain_grids_do_not_offer_steps_without_messages() -> None:
    plain = InProcessGrid(client_app(Federation(make_model()).client), len(SIZES))
    counting = CountingGrid(plain)
    assert (
        counting.open_step(
            [Message(content, node, wire.LAYERWISE) for node, content in contents().items()]
        )
        is None
    )


class HalfOpenGrid(StackedGrid):
    """The nodes of one process, that of partition `odd`, do not open a step.

    `how` says what happens.
    """

    odd, how = 0, ""

    def open_step(self, messages: Sequence[Message]) -> StackedTransport | None:
        step = super().open_step(messages)
        if FIRST_NODE_ID + self.odd not in self.get_node_ids():
            return step
        if self.how == "cannot":
            return None
        if self.how == "fails":
            raise RuntimeError("this half fails")
        assert step is not None
        step.advance = fail  # type: ignore[assignment, method-assign]
        return step


def fail(*_: object) -> NoReturn:
    raise RuntimeError("this half fails")


def half_open(odd: int, how: str, partitions: Sequence[int]) -> StackedGrid:
    grid = HalfOpenGrid(
        client_app(Federation(make_model()).client), len(SIZES), partitions=partitions
    )
    grid.odd, grid.how = odd, how
    return grid


class Scripted:
    """The step of a worker's nodes, which say these values one after another; also the worker's
    grid.
    """

    def __init__(self, nodes: Sequence[int], *said: Requests) -> None:
        self.participants = [Participant(node, 1000 + node, 10.0) for node in nodes]
        self.said, self.is_abandoned = [*said], False

    def open_step(self, messages: Sequence[Message]) -> "Scripted":
        return self

    def advance(self, answer: Answer | None = None) -> Requests | None:
        return self.said.pop(0) if self.said else None

    def replies(self) -> list[Message]:
        return []

    def abandon(self) -> None:
        self.is_abandoned = True


def said(layer: str, *means: float) -> Requests:
    return Requests("mean", layer, torch.tensor(means).unsqueeze(1), (4,) * len(means))


def scripted(*steps: Scripted) -> WorkersTransport:
    """Return the step of workers in this process."""
    shares: list[Any] = [Service() for _ in steps]
    for share, step in zip(shares, steps, strict=True):
        share.grid = step

    def ask_all(name: str, payloads: Any) -> dict[Any, Any]:
        return {share: getattr(share, name)(payload) for share, payload in payloads.items()}

    def abandon(shares: Iterable[Any]) -> None:
        ask_all("abandon", dict.fromkeys(shares))

    grid: Any = SimpleNamespace(_ask_all=ask_all, _abandon=abandon)
    return WorkersTransport(grid, {}, ask_all("open_step", {share: [] for share in shares}))


def test_a_worker_names_the_node_whose_values_it_cannot_pool() -> None:
    steps = (
        Scripted([0, 2], said("a", 1.0, 2.0), said("b", 1.0, 2.0)),
        Scripted([1, 3], said("a", 1.0, 2.0), said("b", 1.0, float("nan"))),
    )
    with pytest.raises(RuntimeError, match=r"^node 1003: the mean of BN layer 'b' is not finite$"):
        take_step(scripted(*steps), lambda: [1.0] * 4)
    assert [step.is_abandoned for step in steps] == [True, True]


def test_a_workers_next_step_begins_without_the_weights_of_the_one_before() -> None:
    share = Service()
    for nodes in ([0, 2, 4], [1, 3]):
        share.grid = Scripted(nodes, *[said("a", *[1.0] * len(nodes)) for _ in range(2)])
        opened = share.open_step([])
        assert opened is not None
        assert opened.requests is not None
        assert len(opened.requests.tensor) == len(nodes)
        assert not opened.requests.pools
        pooled = share.advance(Answer(torch.ones(1), 4, weights=(1.0,) * len(nodes)))
        assert pooled is not None
        assert len(pooled.tensor) == 1


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("how", ["cannot", "fails", "fails at the first layer"])
def test_a_step_that_one_process_cannot_open_is_abandoned_in_the_other(odd: int, how: str) -> None:
    with WorkersGrid(partial(half_open, odd, how), len(SIZES), 2, here=True) as grid:
        if how == "cannot":
            assert grid.open_step(asked()) is None
        else:
            with pytest.raises(WorkerError, match=f"worker {odd}: RuntimeError: this half fails"):
                grid.open_step(asked())
        other = grid._workers[1 - odd]
        with pytest.raises(WorkerError, match="at its end, failed or abandoned"):
            grid._ask_all("advance", {other: Answer(torch.zeros(2, 4), 1)})
        plain = replace(ASKED, layerwise="none").to_config()
        replies = list(
            grid.send_and_receive(
                [
                    Message(RecordDict({**each, wire.CONFIG: plain}), node, "train")
                    for node, each in contents().items()
                ]
            )
        )
        assert [reply.has_error() for reply in replies] == [False] * len(SIZES)


def test_an_interrupt_in_the_middle_of_a_step_closes_the_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with WorkersGrid(stacked_nodes, len(SIZES), 2, here=True) as grid:
        _, step = opened(grid)
        requests = step.advance()
        assert requests is not None
        monkeypatch.setattr(ObjectPipe, "receive", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step.advance(Answer(requests.tensor[0], 1))
        # what comes would be the answer to the question before
        with pytest.raises(WorkerError, match="the grid is closed"):
            grid.open_step(asked())
        step.abandon()
