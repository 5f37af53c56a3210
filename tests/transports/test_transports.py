"""Every transport of a layer-wise step, driven by the one loop: the same requests and gradients, in float64."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr import state, wire
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.layerwise import Answer, Exchange, Requests, lockstep, respond, shared_statistics, take_step
from fedbn_flwr.server.replies import Expected
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid
from fedbn_flwr.simulation.processes.grid import WorkersGrid, WorkersTransport
from fedbn_flwr.simulation.processes.pipe import ObjectPipe
from fedbn_flwr.simulation.processes.service import Service
from fedbn_flwr.simulation.processes.worker import WorkerError
from fedbn_flwr.simulation.stacked.grid import StackedTransport
from fedbn_flwr.traffic.counting_grid import CountingGrid, message_sizes
from fedbn_flwr.transports import LayerwiseGrid, NodesTransport, Participant
from fedbn_flwr.transports.message_records import StepPosition
from fedbn_flwr.transports.message_server import MessageTransport
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, make_model, make_split, parts
from tests.helpers.references import Node, mini_batches

#: uses of BN layers in the harness's model
LAYERS = 2
ASKED = replace(INSTRUCTION, server_round=1, local_steps=1, layerwise="fused")

Gradients = list[dict[str, Tensor]]
Exchanges = list[Requests]


def in_process() -> tuple[Exchanges, Gradients]:
    """Return every exchange's requests, and every client's gradients, of `Lockstep`, without Flower."""
    seen: Exchanges = []

    def step(batch: tuple[Tensor, Tensor], exchange: Exchange) -> dict[str, Tensor]:
        model = copy.deepcopy(make_model()).train()
        with shared_statistics(model, exchange):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    nodes = [Node(index, samples) for index, samples in enumerate(parts())]
    steps = [partial(step, mini_batches(make_split(), node, ASKED, True)[0]) for node in nodes]
    return seen, lockstep(steps, SIZES, range(len(steps)), seen.append)


def stacked_nodes(partitions: Sequence[int]) -> StackedGrid:
    """Some nodes of the harness's federation, stacked."""
    app = client_app(Federation(make_model()).client)
    return StackedGrid(app, len(SIZES), partitions=partitions)


def contents() -> dict[int, RecordDict]:
    arrays = state.to_record(make_model().state_dict())
    return {1000 + index: RecordDict({"arrays": arrays, wire.CONFIG: ASKED.to_config()}) for index in range(len(SIZES))}


@contextmanager
def message_step() -> Iterator[tuple[CountingGrid, NodesTransport]]:
    grid = CountingGrid(InProcessGrid(client_app(Federation(make_model()).client), len(SIZES)))
    yield grid, MessageTransport(grid, contents(), 1, 60.0, Expected((), {}))


@contextmanager
def stacked_step() -> Iterator[tuple[CountingGrid, NodesTransport]]:
    yield opened(stacked_nodes(range(len(SIZES))))


@contextmanager
def shared_out_step() -> Iterator[tuple[CountingGrid, NodesTransport]]:
    with WorkersGrid(stacked_nodes, len(SIZES), 2, here=True) as grid:
        yield opened(grid)


def asked() -> list[Message]:
    """Return the messages that open a step; their order is not that of the participants."""
    position = StepPosition(1).pack()
    return [
        Message(RecordDict({**content, **position}), node, wire.LAYERWISE)
        for node, content in reversed(contents().items())
    ]


def opened(grid: Grid) -> tuple[CountingGrid, NodesTransport]:
    counting = CountingGrid(grid)
    assert isinstance(grid, LayerwiseGrid)
    step = counting.open_step(asked())
    assert step is not None
    return counting, step


TRANSPORTS = {
    "messages": message_step,
    "stacked": stacked_step,
    "this process and a worker": shared_out_step,
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_has_the_requests_and_gradients_of_clients_in_one_process(name: str) -> None:
    seen: Exchanges = []
    with TRANSPORTS[name]() as (grid, step):
        replies = take_step(
            step,
            lambda: [participant.num_examples for participant in step.participants],
            seen.append,
        )
        assert [each.node for each in step.participants] == [1000, 1001, 1002, 1003]
        assert tuple(each.num_examples for each in step.participants) == SIZES
    # 2 L exchanges at the layers, and one that brings the models
    assert grid.training.exchanges == len(seen) + 1 == 2 * LAYERS + 1
    wanted_exchanges, wanted_gradients = in_process()
    # in workers, all nodes of one are a row once it knows their weights
    rows = [4, 2, 2, 2] if isinstance(grid._grid, WorkersGrid) else [4] * 4
    assert [len(requests.tensor) for requests in seen] == rows
    for requests, wanted in zip(seen, wanted_exchanges, strict=True):
        assert (requests.kind, requests.layer, requests.clients) == (wanted.kind, wanted.layer, wanted.clients)
        if not requests.pools:
            assert requests.counts == wanted.counts
            torch.testing.assert_close(requests.tensor, wanted.tensor, rtol=1e-12, atol=1e-13)
        answer, wanted_answer = respond(requests, SIZES), respond(wanted, SIZES)
        assert answer.count == wanted_answer.count
        torch.testing.assert_close(answer.tensor, wanted_answer.tensor, rtol=1e-12, atol=1e-13)
    # counted as if each node had sent its own values
    models = sum(message_sizes(reply).payload for reply in replies)
    assert grid.training.payload_up == models + sum(wanted.tensor.nbytes for wanted in wanted_exchanges)
    by_partition = {reply.content.metric_records[wire.METRICS][wire.PARTITION_ID]: reply for reply in replies}
    start = make_model().state_dict()
    for partition, gradients in enumerate(wanted_gradients):
        trained = state.from_record(by_partition[partition].content.array_records[wire.ARRAYS])
        for parameter, gradient in gradients.items():
            # one step of plain SGD
            moved = (start[parameter] - trained[parameter]) / ASKED.lr
            torch.testing.assert_close(moved, gradient, rtol=1e-10, atol=1e-12)


def test_plain_grids_do_not_offer_steps_without_messages() -> None:
    plain = InProcessGrid(client_app(Federation(make_model()).client), len(SIZES))
    assert not isinstance(plain, LayerwiseGrid)
    counting = CountingGrid(plain)
    assert counting.open_step([Message(content, node, wire.LAYERWISE) for node, content in contents().items()]) is None


class HalfOpenGrid(StackedGrid):
    """The nodes of one process, that of partition `odd`, do not open a step; `how` says what happens."""

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
    grid = HalfOpenGrid(client_app(Federation(make_model()).client), len(SIZES), partitions=partitions)
    grid.odd, grid.how = odd, how
    return grid


class Scripted:
    """The step of a worker's nodes, which say these values one after another; also the worker's grid."""

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
                [Message(RecordDict({**each, wire.CONFIG: plain}), node, "train") for node, each in contents().items()]
            )
        )
        assert [reply.has_error() for reply in replies] == [False] * len(SIZES)


def test_an_interrupt_in_the_middle_of_a_step_closes_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
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
