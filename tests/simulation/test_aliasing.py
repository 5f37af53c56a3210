"""Messages that are not serialized share no memory: whoever changes what it got changes nothing
else.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message

from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid
from fedbn_flwr.state import Arrays, State
from fedbn_flwr.state import records as arrays
from fedbn_flwr.strategies import REGISTRY, FedAvg, Pooled
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import Federation, make_model
from tests.helpers.toys import assert_same_state
from tests.strategies.test_contract import becomes

OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedbn": {},
    "scaffold": {},
    "fixbn": {"freeze_round": 2},
    "fedtan": {},
    "momentum": {"momentum_state": "global"},
    "kept momentum": {"momentum_state": "local"},
    "adam": {"server_optimizer": "adam"},
}


def make_strategy(name: str, base: type[FedAvg] | None = None, **options: Any) -> FedAvg:
    made = REGISTRY.get(name, FedAvg)
    kind = type("Changed", (base, made), {}) if base else made
    strategy: FedAvg = kind(fraction_evaluate=0.0, **OPTIONS.get(name, {}), **options)
    return strategy


class Careless(BNClient):
    """Overwrites what it received, and what it sent last."""

    sent: ClassVar[State] = {}

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        for value in Careless.sent.values():
            value.fill_(99)
        reply = super().train(received, instruction, exchange)
        for group in received.values():
            for value in group.values():
                value.fill_(99)
        groups = reply.records.items()
        Careless.sent = {
            f"{group}/{name}": value for group, part in groups for name, value in part.items()
        }
        return reply


class Destructive(FedAvg):
    """Overwrites all arrays that it can reach, as soon as it has used them."""

    def update(self, pooled: Pooled) -> Arrays:
        merged = super().update(pooled)
        kept = {name: value.copy() for name, value in merged.items()}
        for reply in pooled.replies:
            for group in reply.records.values():
                _overwrite(group)
            for record in reply.content.array_records.values():
                _overwrite({name: array.numpy() for name, array in record.items()})
        _overwrite(self.round.current)
        return kept

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        packages = super().package(nodes, arrays)
        for record in [record for groups in packages.values() for record in groups.values()]:
            _overwrite({name: array.numpy() for name, array in record.items()})
        return packages


def _overwrite(values: Mapping[str, np.ndarray]) -> None:
    for value in values.values():
        value[...] = 99


@pytest.mark.parametrize("grid", [InProcessGrid, OneByOneGrid])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "fedtan"])
@pytest.mark.sampled(7)
def test_a_client_that_overwrites_what_it_got_changes_nothing(
    name: str, grid: type[InProcessGrid]
) -> None:
    wanted = Federation(make_model()).run(make_strategy(name), momentum=0.9)
    got = Federation(make_model(), wrap=becomes(Careless), grid=grid).run(
        make_strategy(name), momentum=0.9
    )
    assert_same_state(got, wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_strategy_that_overwrites_what_it_got_changes_nothing(name: str) -> None:
    wanted = Federation(make_model()).run(make_strategy(name), momentum=0.9)
    got = Federation(make_model()).run(make_strategy(name, Destructive), momentum=0.9)
    assert_same_state(got, wanted)


class Frozen(InProcessGrid):
    """Notes the content of every message and node, and finds what has changed since."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[tuple[Array, np.ndarray]] = []

    def _answer(self, message: Message) -> Message:
        self._note(message)
        reply = super()._answer(message)
        self._note(reply)
        for array, numbers in self.seen:
            np.testing.assert_array_equal(arrays.view_array(array), numbers)
        return reply

    def _note(self, message: Message) -> None:
        records = [*message.content.values(), *self.context(_node(message)).state.values()]
        self.seen += [
            (array, array.numpy())
            for record in records
            if isinstance(record, ArrayRecord)
            for array in record.values()
        ]


def _node(message: Message) -> int:
    return max(message.metadata.src_node_id, message.metadata.dst_node_id)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sampled(2)
def test_nothing_changes_an_array_that_was_sent_or_stored(name: str) -> None:
    nodes = Federation(make_model(), grid=Frozen)
    nodes.run(make_strategy(name), momentum=0.9)
    assert isinstance(nodes.grid, Frozen)
    assert len(nodes.grid.seen) > 100


@pytest.mark.parametrize("name", [*OPTIONS, "fednorm"])
def test_a_run_in_one_process_serializes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialized: list[np.ndarray] = []
    real = arrays._serialize

    def noting(value: np.ndarray) -> bytes:
        serialized.append(value)
        return real(value)

    monkeypatch.setattr(arrays, "_serialize", noting)
    nodes = Federation(make_model())
    nodes.run(make_strategy(name), rounds=4, momentum=0.9)
    # Flower logs how large the model is, at the start and at the end
    assert len(serialized) == 2 * len(nodes.initial)
