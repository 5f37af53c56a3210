"""A suspended step is only a cache: whoever gets the next message, the round ends with the same
bits.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import state, wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.layerwise import Answer, SuspendedStep
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedAvg, FedDNA, FedTAN
from fedbn_flwr.transports import message_client as suspended
from fedbn_flwr.transports import message_records as layerwise_wire
from fedbn_flwr.transports.counting_grid import CountingGrid
from fedbn_flwr.transports.message_records import StepPosition
from tests.helpers.concurrent_nodes import ConcurrentNodes, dropout_model, make_client
from tests.helpers.harness import SIZES, Federation
from tests.helpers.waiting import wait_until

CASES: dict[str, Callable[..., FedAvg]] = {
    "fused": FedTAN,
    "paper": lambda **options: FedTAN(exchange="paper", **options),
    "forward": FedDNA,
    "momentum of the server": lambda **options: FedTAN(momentum_state="global", **options),
    "momentum of the node": lambda **options: FedTAN(momentum_state="local", **options),
}


class Nodes(Federation):
    """Dropout, momentum, and augmentation: everything that must be the same in a replay."""

    def __init__(self, grid: type[InProcessGrid] = InProcessGrid) -> None:
        super().__init__(dropout_model())
        self.grid = grid(client_app(make_client), len(SIZES))

    def train(self, strategy: FedAvg, rounds: int = 2) -> tuple[state.State, CountingGrid]:
        counted = CountingGrid(self.grid)
        options: dict[str, Any] = {"momentum": 0.9, "augmentation": "crop-flip"}
        return self.run(strategy, rounds, grid=counted, **options), counted


def same(one: state.State, other: state.State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Forgetful(InProcessGrid):
    """Nothing is held between messages."""

    def _answer(self, message: Message) -> Message:
        suspended.STEPS.clear()
        return super()._answer(message)


class Restarted(Forgetful):
    """Node 1001 starts anew before each message: it has no state either."""

    def _answer(self, message: Message) -> Message:
        if message.metadata.dst_node_id == 1001:
            self.remember(1001, RecordDict())
        return super()._answer(message)


class SomeWorker(InProcessGrid):
    """Each message goes to one of three workers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.workers, self.draw = [dict[Any, Any]() for _ in range(3)], random.Random(0)

    def _answer(self, message: Message) -> Message:
        suspended.STEPS = self.draw.choice(self.workers)
        return super()._answer(message)


class InTurns(InProcessGrid):
    """A node's messages go to two workers in turns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.workers: dict[int, list[dict[Any, Any]]] = {}

    def _answer(self, message: Message) -> Message:
        workers = self.workers.setdefault(message.metadata.dst_node_id, [{}, {}])
        suspended.STEPS = workers[0]
        workers.reverse()
        return super()._answer(message)


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended, "STEPS", {})


class Copied(InProcessGrid):
    """Flower hands over a new Context with every message.

    What a step stores must go into the last one.
    """

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        self.remember(node, RecordDict(dict(self.context(node).state)))
        return super()._answer(message)


class Apart(ConcurrentNodes):
    """Each message goes to a process of its own."""

    def __init__(self, _: ClientApp, num_nodes: int) -> None:
        super().__init__(num_nodes)


@pytest.mark.parametrize(
    ("case", "grid"),
    [
        *zip([case for case in CASES if case != "fused"], [Forgetful, SomeWorker] * 2, strict=True),
        ("momentum of the node", Copied),
        ("fused", Apart),
    ],
)
@pytest.mark.sampled(2)
def test_replay_has_the_bits_of_the_step_in_memory(case: str, grid: type[InProcessGrid]) -> None:
    rounds = 1 if grid is Apart else 2
    held, one = Nodes(InProcessGrid).train(CASES[case](), rounds)
    replayed, other = Nodes(grid).train(CASES[case](), rounds)
    assert same(held, replayed)
    assert one.training == other.training


def test_a_process_takes_each_part_of_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches up with what another process has done in between, instead of a replay."""
    advanced, advance = list[int](), SuspendedStep.advance

    def noting(step: SuspendedStep[Any], answer: Answer | None = None) -> Any:
        advanced.append(1)
        return advance(step, answer)

    monkeypatch.setattr(SuspendedStep, "advance", noting)
    _, counted = Nodes(InTurns).train(FedTAN(exchange="paper"), 1)
    assert counted.training.exchanges > 3  # or a replay takes no longer
    assert len(advanced) <= 2 * len(SIZES) * counted.training.exchanges


def test_of_nodes_that_take_turns_as_many_hold_their_step_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_held, _ = Nodes().train(FedTAN(), 1)
    monkeypatch.setattr(suspended, "MAX_STEPS", 2)
    made, advance = list[str](), SuspendedStep.advance

    def noting(step: SuspendedStep[Any], answer: Answer | None = None) -> Any:
        made.extend(["step"] * (answer is None))
        assert len(suspended.STEPS) <= 2
        return advance(step, answer)

    monkeypatch.setattr(SuspendedStep, "advance", noting)
    some_held, counted = Nodes().train(FedTAN(), 1)
    assert same(all_held, some_held)
    # two nodes make their step once, and the others with each message
    assert len(made) == 2 + (len(SIZES) - 2) * counted.training.exchanges


@pytest.mark.parametrize("case", ["fused", "momentum of the server"])
def test_a_node_that_lost_its_state_asks_for_the_arrays(case: str) -> None:
    held, plain = Nodes().train(CASES[case]())
    restarted, counted = Nodes(Restarted).train(CASES[case]())
    assert same(held, restarted)
    # in two rounds of five exchanges, all but the first are repeated for one node; what is sent
    # again is counted
    assert counted.training.exchanges == plain.training.exchanges + 2 * 4
    whole = sum(value.nbytes for value in held.values())
    assert counted.training.payload_down - plain.training.payload_down >= 2 * 4 * whole


def test_above_the_size_limit_arrays_are_not_kept_but_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, plain = Nodes().train(FedTAN())
    assert 0 < kept_bytes() < 2**20
    monkeypatch.setattr(suspended, "REPLAY_LIMIT", 0)
    unneeded, same_count = Nodes().train(FedTAN())
    asked, counted = Nodes(Forgetful).train(FedTAN())
    assert same(held, asked)
    assert same(held, unneeded)
    assert same_count.training.exchanges == plain.training.exchanges
    assert counted.training.exchanges == 2 * plain.training.exchanges - 2
    assert kept_bytes() == 0


def kept_bytes() -> int:
    """What is in a node's state in the middle of a step."""
    nodes = Nodes()
    ask(nodes, StepPosition(), arrays=True)
    kept = Memory(nodes.grid.context(1000).state).kept("layerwise/")
    return sum(
        len(array.data) for _, record in kept for array in record.values() if hasattr(array, "data")
    )


def ask(nodes: Nodes, turn: StepPosition, arrays: bool = False, **options: Any) -> Message:
    instruction = wire.Instruction(
        **{"server_round": 1, "layerwise": "fused", "local_steps": 1, **options}
    )
    content = RecordDict({wire.CONFIG: instruction.to_config(), **turn.pack()})
    if arrays:
        content[wire.ARRAYS] = nodes.initial
    [reply] = nodes.grid.send_and_receive([Message(content, 1000, wire.LAYERWISE)])
    return reply


def test_after_the_round_nothing_is_kept() -> None:
    nodes = Nodes()
    nodes.train(FedTAN())
    assert len(suspended.STEPS) == 0
    for node in nodes.grid.get_node_ids():
        assert not list(Memory(nodes.grid.context(node).state).kept("layerwise/"))


def test_a_new_start_takes_the_place_of_the_step_before() -> None:
    nodes = Nodes()
    before = threading.active_count()
    for attempt in (1, 2, 3):
        assert layerwise_wire.REQUEST in ask(nodes, StepPosition(attempt), arrays=True).content
        assert len(suspended.STEPS) == 1
        assert [name for name, _ in Memory(nodes.grid.context(1000).state).kept("layerwise/")] == [
            f"1.{attempt}/received/arrays"
        ]
    assert wait_until(lambda: threading.active_count() <= before + 1)
    # the answer to the first attempt comes late: its step is gone, and so are its notes
    assert layerwise_wire.LACKS_ARRAYS in ask(nodes, StepPosition(1, 1)).content[wire.REPORT]
    assert len(suspended.STEPS) == 0


def test_what_cannot_be_meant_is_named() -> None:
    refused = ask(Nodes(), StepPosition(), arrays=True, layerwise="magic")
    assert "unknown layerwise 'magic'" in str(refused.error.reason)


SOUND: dict[str, Any] = {"kind": "statistics", "count": 2}


@pytest.mark.parametrize(
    ("layers", "report"),
    [
        (["b"], {"kind": "guesses", "count": 2}),
        (["b"], {"kind": "statistics", "count": "many"}),
        (["b"], {"kind": "statistics", "count": [2]}),
        (["b"], {"kind": "statistics"}),
        (["b"], {"count": 2}),
        ([], SOUND),
        (["a", "b"], SOUND),
    ],
)
def test_a_reply_without_one_request_that_can_be_read(
    layers: list[str], report: dict[str, Any]
) -> None:
    assert layerwise_wire.read_request(asking(["b"], SOUND)).layer == "b"
    with pytest.raises((KeyError, ValueError)):
        layerwise_wire.read_request(asking(layers, report))


def asking(layers: list[str], report: dict[str, Any]) -> RecordDict:
    """Return a reply that asks for these layers."""
    tensors = {layer: torch.zeros(2, 3) for layer in layers}
    return RecordDict(
        {layerwise_wire.REQUEST: state.to_record(tensors), wire.REPORT: ConfigRecord(report)}
    )
