"""Clients that fail beside others, and what nodes remember of training together."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Context
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.simulation.how_trained import APART
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.reply_pool import Replies, ReplyPool, Trained
from fedbn_flwr.state.records import flat_of
from fedbn_flwr.strategies import FedAvg, FedBN, Scaffold
from tests.helpers.engine_comparison import (
    EXACT,
    Stacked,
    asked,
    both,
    difference,
    quiet,
    watching,
)
from tests.helpers.harness import INSTRUCTION, Double, Federation, distance, make_model
from tests.strategies.test_contract import becomes


def spoiled(
    change: Callable[[BNClient], object], partition: int = 1
) -> Callable[[BNClient, int], BNClient]:
    def wrap(client: BNClient, index: int) -> BNClient:
        if index == partition:
            change(client)
        return client

    return wrap


def bad_labels(client: BNClient) -> None:
    split = client.train_split
    client.train_split = replace(split, labels=split.labels + 99)


def no_data(client: BNClient) -> None:
    client.indices = client.indices[:0]


def no_number(client: BNClient) -> None:
    split = client.train_split
    client.train_split = replace(split, inputs=split.inputs * float("nan"))


def test_a_stack_whose_replies_do_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit on a device is here said of more than two clients."""
    wanted = Federation(make_model(), grid=InProcessGrid).run(quiet(FedAvg))
    add = ReplyPool.add

    def refuse(pool: ReplyPool, trained: Trained) -> Replies:
        if len(trained.jobs) > 2:
            raise torch.OutOfMemoryError
        return add(pool, trained)

    monkeypatch.setattr(ReplyPool, "add", refuse)
    nodes = Federation(make_model(), grid=Stacked)
    assert distance(wanted, nodes.run(quiet(FedAvg))) < EXACT
    how = nodes.grid.how_trained()
    assert (how.most, max(how.sizes)) == (2, 2)


def test_what_a_stack_cannot_keep_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what a client cannot keep that trains by itself."""

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(InProcessGrid, "_keep", full)
    for grid in (InProcessGrid, Stacked):
        with pytest.raises(OSError, match="the disk is full"):
            Federation(make_model(), grid=grid).run(quiet(FedBN), rounds=1)


FAULTS: dict[str, tuple[Callable[[BNClient], None], str]] = {
    "labels that do not exist": (bad_labels, "out of bounds"),
    "no data": (no_data, "at least one sample"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_one_client_that_fails_is_named_and_the_others_do_not_suffer(case: str) -> None:
    change, said = FAULTS[case]
    alone, together = both(
        lambda: quiet(FedAvg), nodes={"wrap": spoiled(change)}, local_steps=0, local_epochs=1
    )
    assert difference(alone, together) < EXACT
    assert [reply.partition for reply in together.strategy.training.replies] == [0, 2, 3]
    named = [
        text for text in together.watch.messages if "Node 1001 is left out of this round" in text
    ]
    assert len(named) == 2
    assert all(said in text for text in named)
    # who cannot even be planned is not among those who are stacked
    assert together.watch.stacks == ([3] * 2 if case == "no data" else [])
    assert len(together.watch.reasons) == (case != "no data")


class OwnOptimizer:
    """A user's own, which compares by value and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnOptimizer)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, model: nn.Module, instruction: wire.Instruction) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=instruction.lr)


def own_optimizer(client: BNClient) -> None:
    client.make_optimizer = OwnOptimizer()


def test_numbers_that_are_none_stay_with_their_client() -> None:
    """In a stack, rows do not mix: neither in losses, nor in gradients, nor while clients wait at
    their end.
    """
    options: dict[str, Any] = {
        "nodes": {"wrap": spoiled(no_number)},
        "momentum": 0.9,
        "weight_decay": 0.1,
    }
    alone, together = both(lambda: quiet(Scaffold), local_steps=0, local_epochs=2, **options)
    assert together.watch.stacks == [4] * 2
    assert [reply.partition for reply in together.strategy.training.replies] == [0, 2, 3]
    assert difference(alone, together) < EXACT


class Weaker(BNClient):
    """Trains with half of the learning rate."""

    def train(
        self,
        received: Mapping[str, state.State],
        instruction: wire.Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        return super().train(received, replace(instruction, lr=instruction.lr / 2), exchange)


OWN_WAYS: dict[str, Callable[[BNClient, int], BNClient]] = {
    "Weaker may train in a way of its own": becomes(Weaker, 1),
    "its optimizer is its own": spoiled(own_optimizer),
}


@pytest.mark.parametrize("reason", OWN_WAYS)
def test_a_client_with_a_way_of_its_own_keeps_it(reason: str) -> None:
    """The others are stacked."""
    alone, together = both(lambda: quiet(FedAvg), nodes={"wrap": OWN_WAYS[reason]})
    assert difference(alone, together) < EXACT
    assert together.watch.stacks == [3] * 2
    assert together.watch.reasons == [reason]


def test_nobody_keeps_the_whole_stack() -> None:
    """What a node remembers is in memory of its own size, not a view of everybody's."""
    nodes = Federation(make_model(), grid=Stacked)
    instruction = replace(INSTRUCTION, stays="bn", momentum=0.9, momentum_state="local")
    nodes.grid.push_messages(asked(nodes, instruction.with_rule(control_variates=True)))
    kept = [
        flat_of(record)
        for context in nodes.grid.contexts()
        for record in context.state.array_records.values()
    ]
    runs = [run for flat in kept if flat for run in flat.buffers.values()]
    assert len(runs) >= 4 * 3
    for run in runs:
        assert isinstance(run.base, torch.Tensor)
        assert run.base.untyped_storage().nbytes() == run.nbytes


class Breaking(nn.Module):
    """Trains until its weights have moved."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("in the middle")
        result: torch.Tensor = self.net(inputs)
        return result


def test_a_stack_that_fails_in_the_middle_changes_no_memory() -> None:
    """The clients then train alone from where they were."""

    def run(grid: type[InProcessGrid], model: nn.Module) -> tuple[Federation, list[str]]:
        nodes = Federation(model, grid=grid)
        with watching() as watch:
            nodes.run(quiet(Scaffold, momentum_state="local"), 2, momentum=0.9)
        return nodes, watch.messages

    with torch.random.fork_rng():
        torch.manual_seed(0)
        broken = Double(Breaking())
    whole = Double(Breaking())
    whole.load_state_dict(broken.state_dict())
    whole.net.calls = 3  # type: ignore[assignment]
    alone, _ = run(InProcessGrid, whole)
    together, messages = run(Stacked, broken)
    assert [text for text in messages if text.startswith(APART)] == [
        f"{APART}RuntimeError: in the middle"
    ]
    for node in alone.grid.get_node_ids():
        mine, wanted = (nodes.grid.context(node).state.array_records for nodes in (together, alone))
        assert mine.keys() == wanted.keys()
        for name in mine:
            assert distance(state.from_record(mine[name]), state.from_record(wanted[name])) < EXACT


def test_a_node_that_lost_its_memory_is_stacked_with_its_like() -> None:
    """It is sent the whole model and trains in the same round, after the others; then with them."""

    def run(grid: type[InProcessGrid]) -> tuple[state.State, list[int]]:
        nodes, strategy = Federation(make_model(), grid=grid), quiet(FedBN)
        nodes.run(strategy, 1)
        context: Context = nodes.grid.context(1001)
        context.state.clear()
        with watching() as watch:
            final = nodes.run(strategy, 3)
        return final, watch.stacks

    alone, together = run(InProcessGrid), run(Stacked)
    assert distance(alone[0], together[0]) < EXACT
    assert together[1] == [3, 4, 4]
