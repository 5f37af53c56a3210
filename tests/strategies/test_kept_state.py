"""A strategy that takes up another one's state goes on as if it had been that one."""

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedbn_flwr import state
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import REGISTRY, BaseStrategy
from fedbn_flwr.traffic.counting_grid import CountingGrid
from tests.helpers.harness import INSTRUCTION, Backwards, Federation, make_model
from tests.strategies.test_contract import TABLE

ROUNDS, DONE = 6, 4
#: options under which more is kept from round to round, so that each is known after `DONE` rounds and used later
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: options for name, (options, _, _) in TABLE.items()},
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
    "fedtan:carried": {"carry": True},
    "fedtan:carried, some nodes": {"carry": True, "fraction_train": 0.5},
    "feddna:carried": {"carry": True},
}
#: attributes that belong to a round, to a process, or can be asked again; what they hold no later round depends on
PASSING = {
    "_corrections",
    "_expected_replies",
    "_final",
    "_has_gathered",
    "_lost",
    "_refused",
    "_sent",
    # what nodes said before a run is resumed, they say again
    "first_counts",
    "evaluation.replies",
    "measured",
    "num_rounds",
    "partitions",
    "roster",
    "round",
    "started",
    "training.replies",
}


class StopError(Exception):
    """Ends a run after a round."""


class Run:
    """A part of a run, in a federation of its own."""

    def __init__(self, case: str, strategy: BaseStrategy, grid: type[InProcessGrid] = InProcessGrid) -> None:
        self.case, self.strategy = case, strategy
        self.nodes = Federation(make_model(TABLE[case.partition(":")[0]][1]), grid=grid)
        self.grid = CountingGrid(self.nodes.grid)
        self.last = self.nodes.initial
        #: after every round, the model and what the method measured
        self.rounds: list[tuple[state.State, dict[str, Any]]] = []

    def go(self, until: int, **options: Any) -> None:
        """Run the rounds up to one."""

        def after(server_round: int, arrays: ArrayRecord) -> None:
            self.last = arrays
            self.rounds += [(state.from_record(arrays), dict(self.strategy.measured))] if server_round else []
            if server_round == until < ROUNDS:
                raise StopError

        config = ConfigRecord({"seed": INSTRUCTION.seed})
        asked: dict[str, Any] = {
            "train_config": replace(INSTRUCTION, momentum=0.5).to_config(),
            "evaluate_config": config,
            "evaluate_fn": after,
        }
        with suppress(StopError):
            self.strategy.start(self.grid, self.last, ROUNDS, **asked, **options)

    def continued(self, before: "Run") -> None:
        """Take up another run, whose nodes have other ids."""
        self.last = before.last
        nodes = dict(self.nodes.grid._contexts)
        here = {int(context.node_config["partition-id"]): node for node, context in nodes.items()}
        for context in before.nodes.grid._contexts.values():
            node = here[int(context.node_config["partition-id"])]
            self.nodes.grid._contexts[node] = copy.deepcopy(nodes[node])
            self.nodes.grid._contexts[node].state = copy.deepcopy(context.state)
        self.strategy.load_state_dict(copy.deepcopy(before.strategy.state_dict()), here)
        self.go(ROUNDS, rounds_done=DONE)


def make(case: str) -> BaseStrategy:
    return REGISTRY[case.partition(":")[0]](lr_schedule="warmup@0.2,cosine@0.5", evaluate_every=2, **OPTIONS[case])


#: they keep what another case keeps
SAME = ("fedprox", "fixbn", "silobn", "mtfl", "feddna", "centralized", "fedbs:second stage", "fedtan:carried")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SAME else ()) for case in OPTIONS]
)
def test_rounds_after_a_stop_have_the_bits_and_bytes_of_those_without(case: str) -> None:
    """And every attribute that a run changes is kept, or known to pass."""
    whole, first, second = Run(case, make(case)), Run(case, make(case)), Run(case, make(case), Backwards)
    before = copy.deepcopy(dict(vars(whole.strategy)))
    whole.go(ROUNDS)
    assert changed(whole.strategy, before) <= kept(whole.strategy)
    first.go(DONE)
    second.continued(first)
    assert len(whole.rounds) == ROUNDS
    for (one, measured), (other, again) in zip(whole.rounds, first.rounds + second.rounds, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert measured == again
    both = first.grid.training.payload + second.grid.training.payload
    assert both == whole.grid.training.payload


def changed(strategy: BaseStrategy, before: dict[str, Any]) -> set[str]:
    """Return the attributes that are no longer as before, without those that belong to a round."""
    return {name for name in set(vars(strategy)) - PASSING if repr(getattr(strategy, name)) != repr(before[name])}


def kept(strategy: BaseStrategy) -> set[str]:
    """Return the attributes that a checkpoint holds, or a part of them."""
    return {name.partition(".")[0] for name in (*strategy._named("kept"), *strategy._named("kept_by_node"))}


def test_a_run_that_trained_before_survives_a_round_without_replies() -> None:
    first, second = make("fedavg"), make("fedavg")
    first.ever_trained = True
    second.load_state_dict(first.state_dict(), {})
    assert second.aggregate_train(2, []) == (None, None)
