"""What a method keeps is one value: whoever takes it up goes on as if it had been there from the
start.
"""

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from fedbn_flwr import state, wire
from fedbn_flwr.server.method_state import (
    BY_NODE,
    LostRounds,
    MethodState,
    pack_state,
    unpack_state,
)
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, FedAvg, FedBN, Scaffold
from fedbn_flwr.transports.counting_grid import CountingGrid
from tests.helpers.faults import failed, infinite, spoiling
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, Traffic, distance, make_model
from tests.strategies.test_contract import SOLVED, TABLE

ROUNDS = 6
#: options under which more is kept from round to round, each from some round on until a later one
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: options for name, (options, _, _) in TABLE.items()},
    # a node a round, and then they are done
    **{name: {"fraction_train": 0.25, "min_train_nodes": 1} for name in SOLVED},
    "fedavg:momentum": {"momentum_state": "global"},
    "fedavg:local momentum": {"momentum_state": "local"},
    "fedavg:adam": {"server_optimizer": "adam"},
    "fedavg:some nodes": {"fraction_train": 0.5},
    "fixbn:freeze": {"freeze_round": 2},
    "fixbn:auto": {"freeze_round": "auto", "window": 2, "threshold": 30.0},
    "fixbn:auto, some nodes": {
        "freeze_round": "auto",
        "window": 3,
        "threshold": 0.0,
        "latest": 1.0,
        "fraction_train": 0.75,
    },
    "fedbs:second stage": {"epsilon": 10.0, "patience_rounds": 2},
    "fedbs:second stage later": {"epsilon": 10.0, "patience_rounds": 5},
    "fedbn:mean": {"mean_personal": True, "fraction_evaluate": 1.0, "min_evaluate_nodes": 1},
    "fedbn:some nodes": {"fraction_train": 0.5},
    "scaffold:some nodes": {"fraction_train": 0.5},
    # of which nodes cannot say before they train how much they have
    "scaffold:weights by a metric": {
        "fraction_train": 0.5,
        "fraction_evaluate": 0.0,
        "weighted_by_key": "train-loss",
    },
    "fedtan:carried": {"carry": True},
    "fedtan:carried, some nodes": {"carry": True, "fraction_train": 0.5},
    "feddna:carried": {"carry": True},
    "fedtan:a bound that is a mean": {"robust": "norm:1.5", "carry": True},
    "fedavg:a lost round": {"momentum_state": "global", "server_optimizer": "yogi"},
    "fixbn:a lost round": {"freeze_round": "auto", "latest": 0.7, "threshold": 0.0},
    "fedbn:a lost round": {
        "mean_personal": True,
        "fraction_evaluate": 1.0,
        "min_evaluate_nodes": 1,
    },
    "fedtan:a lost round": {"carry": True},
    "hbn:nobody gathers": {"average": 0.5},
    "fixbn:exact": {"freeze_round": 4, "statistics": "exact"},
    "mtfl:own": {"statistics": "own", "fraction_evaluate": 1.0, "min_evaluate_nodes": 1},
}
#: the round that is lost where one is; nodes evaluate after it
LOST = 4


class NobodyGathers(InProcessGrid):
    """A grid in which no node can gather in one round."""

    def _answer(self, message: Message) -> Message:
        is_asked = message.metadata.message_type == wire.GATHER
        fails = is_asked and message.content.config_records[wire.CONFIG]["server-round"] == LOST
        return failed(message, message) if fails else super()._answer(message)


def lost(rounds: range, spoil: Any = failed) -> type[InProcessGrid]:
    """Return a grid in which all nodes fail in some rounds."""
    return spoiling(spoil, lambda _, number: number in rounds)


#: attributes that belong to a process or to its latest rounds; beside them, only the state changes
PASSING = {"training", "evaluation", "round", "roster", "partitions", "num_rounds", "started"}


class StopError(Exception):
    """Ends a run after a round."""


class Run:
    """A run, or a part of one, in a federation whose nodes have ids of their own."""

    def __init__(self, case: str, number: int = 0, strategy: BaseStrategy | None = None) -> None:
        name, _, part = case.partition(":")
        grids: dict[str, type[InProcessGrid]] = {
            "a lost round": lost(range(LOST, LOST + 1)),
            "nobody gathers": NobodyGathers,
        }
        self.strategy = strategy or make(case)
        self.nodes = Federation(make_model(TABLE[name][1]), grid=grids.get(part, InProcessGrid))
        first, grid = 1000 * (number + 1), self.nodes.grid
        grid._nodes = range(first, first - 13 * len(grid._nodes), -13)
        self.grid = CountingGrid(self.nodes.grid)
        self.last = self.nodes.initial
        #: after every round, the model and what the method measured
        self.rounds: list[tuple[state.State, list[dict[str, Any]]]] = []

    def go(self, until: int = ROUNDS, **options: Any) -> "Run":
        """Run the rounds up to one."""

        def after(server_round: int, arrays: ArrayRecord) -> None:
            self.last = arrays
            measured = [
                dict(each.measured) for each in (self.strategy.training, self.strategy.evaluation)
            ]
            self.rounds += [(state.from_record(arrays), measured)] if server_round else []
            if server_round == until < ROUNDS:
                raise StopError

        asked: dict[str, Any] = {
            "train_config": replace(INSTRUCTION, momentum=0.5).to_config(),
            "evaluate_config": ConfigRecord({"seed": INSTRUCTION.seed}),
            "evaluate_fn": after,
        }
        with suppress(StopError):
            self.strategy.start(self.grid, self.last, ROUNDS, **asked, **options)
        return self

    def take_up(self, before: "Run") -> "Run":
        """Take up what another run has left: the model, what the strategy keeps, and what nodes
        remember.
        """
        self.last = before.last
        here = dict(enumerate(self.nodes.grid.get_node_ids()))
        for context in before.nodes.grid.contexts():
            self.nodes.grid.remember(here[partition_of(context)], copy.deepcopy(context.state))
        self.strategy.load_state_dict(copy.deepcopy(before.strategy.state_dict()), here)
        return self


class Forgetful(Traffic):
    """A grid whose nodes send no momentum in one round."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies if self.sent[-1].content[wire.CONFIG]["server-round"] == 2 else ():
            del reply.content[wire.MOMENTUM]
        return replies


def test_a_round_without_momentum_leaves_the_servers_as_it_was() -> None:
    nodes = Federation(make_model(), grid=Forgetful)
    nodes.run(FedAvg(momentum_state="global", fraction_evaluate=0.0), momentum=0.9)
    assert isinstance(nodes.grid, Traffic)
    sent = [message.content.array_records for message in nodes.grid.sent[:: len(nodes.parts)]]
    first, second, third = (
        state.from_record(each[wire.MOMENTUM]) if wire.MOMENTUM in each else {} for each in sent
    )
    assert not first
    assert len(second) == len(dict(nodes.model.named_parameters()))
    assert distance(second, third) == 0


def partition_of(context: Any) -> int:
    return int(context.node_config["partition-id"])


def make(case: str) -> BaseStrategy:
    return REGISTRY[case.partition(":")[0]](
        lr_schedule="warmup@0.2,cosine@0.5", evaluate_every=2, **OPTIONS[case]
    )


def handed_over(case: str) -> list[Run]:
    """Return the parts of a run in which a new strategy takes over after every round."""
    parts = [Run(case).go(1)]
    for done in range(1, ROUNDS):
        assert_plain(parts[-1].strategy.state_dict())
        parts.append(Run(case, done).take_up(parts[-1]).go(done + 1, rounds_done=done))
    return parts


def assert_plain(value: Any) -> None:
    """Check that a checkpoint can hold it."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            assert_plain(each)
    else:
        assert value is None or isinstance(
            value, np.ndarray | np.generic | bool | int | float | str
        )


#: they keep what another case keeps
SAME = (
    "fedprox",
    "fixbn",
    "silobn",
    "mtfl",
    "feddna",
    "centralized",
    "fedbs:second stage",
    "fedtan:carried",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SAME else ()) for case in OPTIONS]
)
@pytest.mark.sampled(6)
def test_whoever_takes_over_after_any_round_goes_on_with_the_same_bits_and_bytes(case: str) -> None:
    """And in one go, nothing of a strategy changes but its state, and what is of a process."""
    strategy = make(case)
    before = {name: content(value) for name, value in vars(strategy).items()}
    whole = Run(case, strategy=strategy).go()
    after = {name: content(value) for name, value in vars(strategy).items()}
    assert {name for name in after if after[name] != before.get(name)} <= {"state", *PASSING}
    parts = handed_over(case)
    rounds = [each for part in parts for each in part.rounds]
    assert len(whole.rounds) == len(rounds) == (len(SIZES) if case in SOLVED else ROUNDS)
    for (model, measured), (other, again) in zip(whole.rounds, rounds, strict=True):
        assert all(torch.equal(model[name], other[name]) for name in model)
        assert measured == again
    assert sum(part.grid.training.payload for part in parts) == whole.grid.training.payload


def content(value: Any) -> Any:
    """Return what an object holds, to be compared with what it holds later."""
    if isinstance(value, Mapping):
        return {key: content(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [content(each) for each in value]
    if type(value).__module__.split(".")[0] in ("fedbn_flwr", "strategies") and hasattr(
        value, "__dict__"
    ):
        return content(vars(value))
    return repr(value)


@pytest.mark.parametrize(
    "case", ["fedavg:a lost round", "fixbn:a lost round", "fedbn:a lost round"]
)
def test_in_these_runs_a_round_is_lost(case: str) -> None:
    before, after = [rounds[0] for rounds in Run(case).go().rounds][LOST - 2 : LOST]
    assert distance(before, after) == 0


# ---- rounds that are lost ------------------------------------------------------------------------


def test_a_node_that_has_never_sent_anything_usable_is_no_obstacle() -> None:
    """Nobody knows its partition."""

    def spoil(message: Message, reply: Message) -> Message:
        return (
            infinite(message, reply)
            if message.metadata.dst_node_id == 1001
            else failed(message, reply)
        )

    strategy = FedAvg(fraction_evaluate=0.0)
    grid = spoiling(spoil, lambda partition, number: partition == 1 or number > 1)
    Federation(make_model(), grid=grid).run(strategy, 2)
    assert strategy.state.lost.fruitless == 1
    assert strategy.state_dict()["lost"]["fruitless"] == 1


# ---- the value -----------------------------------------------------------------------------------


@dataclass
class Inner:
    by_node: dict[int, list[float]] = field(default_factory=dict, metadata=BY_NODE)
    total: np.ndarray | None = None


@dataclass
class Outer(MethodState):
    seen: dict[int, bool] = field(default_factory=dict, metadata=BY_NODE)
    by_round: dict[int, str] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def test_what_is_kept_by_nodes_has_their_new_ids_and_forgets_those_that_are_gone() -> None:
    """Also within a part of the state, and in the order in which it was kept.

    Other numbers are no ids.
    """
    inner, lost_rounds = (
        Inner({71: [1.0], 70: [0.0], 72: [2.0]}, np.ones(2)),
        LostRounds(2, {70: "a"}, {71: True, 72: True}),
    )
    kept = Outer(
        True, 4, seen={70: True, 72: False}, by_round={70: "x"}, inner=inner, lost=lost_rounds
    )
    packed = pack_state(kept, {70: 0, 71: 1, 72: 2})
    assert packed["inner"]["by_node"] == {1: [1.0], 0: [0.0], 2: [2.0]}
    assert (packed["seen"], packed["lost"]["nodes"]) == ({0: True, 2: False}, {1: True, 2: True})
    found = Outer()
    unpack_state(found, packed, {0: 900, 1: 700})
    assert list(found.inner.by_node.items()) == [(700, [1.0]), (900, [0.0])]
    assert found.inner.total is not None
    assert found.inner.total.tolist() == [1.0, 1.0]
    assert (found.ever_trained, found.frozen_after, found.seen, found.by_round) == (
        True,
        4,
        {900: True},
        {70: "x"},
    )
    assert found.lost == LostRounds(2, {70: "a"}, {700: True})


def test_a_method_of_several_keeps_what_all_of_them_keep() -> None:
    both: Any = type("Both", (Scaffold, FedBN), {})
    names = both().state_dict().keys()
    assert names == Scaffold().state_dict().keys() | FedBN().state_dict().keys()
    assert names > Scaffold().state_dict().keys()
