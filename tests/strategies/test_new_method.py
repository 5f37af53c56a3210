"""A method that names no feature, with both halves and a group of its own: all work with it, or refuse it."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from fedbn_flwr import wire
from fedbn_flwr.client import Rule, Session, register_rule
from fedbn_flwr.client.rules import RULES
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN, Group, NodeReply, Pooled, Privacy
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import SIZES, Federation, distance, make_model
from tests.helpers.registered import registries_restored

Arrays = dict[str, NDArray[Any]]
GRADIENTS, BETA, RATE = "sums-of-gradients", 0.9, 0.01


class SendGradients(Rule):
    """Send the sum of the round's gradients."""

    send_gradients: bool = False

    def begin(self, session: Session) -> None:
        self._learned = session.learned()
        self._sums = {name: value.detach() * 0 for name, value in self._learned.items()}

    def adjust(self) -> None:
        for name, parameter in self._learned.items():
            if parameter.grad is not None:
                self._sums[name] += parameter.grad

    def finish(self, session: Session) -> None:
        session.records[GRADIENTS] = self._sums


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registries_restored():
        register_rule(SendGradients)
        yield


class Pushed(FedAvg):
    """v <- beta v + sum_k p_k g_k, w <- sum_k p_k w_k - rate v."""

    pools: ClassVar[tuple[Group, ...]] = (Group("sums of gradients", GRADIENTS),)
    kept: ClassVar[tuple[str, ...]] = ("push",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.push: Arrays = {}

    def instruct(self, instruction: Instruction) -> Instruction:
        return super().instruct(instruction).with_rule(send_gradients=True)

    def update(self, pooled: Pooled) -> Arrays:
        gradients = pooled.groups[GRADIENTS]
        self.push = {name: BETA * self.push.get(name, 0.0) + value for name, value in gradients.items()}
        state = super().update(pooled)
        return {**state, **{name: state[name] - RATE * value for name, value in self.push.items()}}


class ByHand(Pushed):
    """The same of single replies, summed by hand."""

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        robust, groups = self.robust, dict[str, Arrays]()
        for group in (wire.ARRAYS, GRADIENTS):
            groups[group] = {}
            for name in replies[0].records[group]:
                rows = np.stack([reply.records[group][name] for reply in replies])
                is_counter, shares = rows.dtype.kind != "f", np.array(weights) / sum(weights)
                middle = np.median(rows, axis=0) if robust else np.tensordot(shares, rows, 1)
                groups[group][name] = rows.max(axis=0) if is_counter else middle
        pooled = self.pool(replies, weights)
        return self.update(Pooled({**pooled.groups, **groups}, {}, pooled.deviation))


def nodes(partitions: Sequence[int]) -> StackedGrid:
    if SendGradients not in RULES.values():  # in another process
        register_rule(SendGradients)
    return StackedGrid(client_app(Federation(make_model()).client), len(SIZES), partitions=partitions)


class Declared(Pushed):
    pools: ClassVar[tuple[Group, ...]] = (Group("what it looks at", by_node=True),)


def run(strategy: FedAvg, kind: str = "messages", **instruction: Any) -> Any:
    federation = Federation(make_model())
    if kind == "messages":
        return federation.run(strategy, 3, **instruction)
    if kind == "stacked":
        return federation.run(strategy, 3, grid=nodes(range(len(SIZES))), **instruction)
    with WorkersGrid(nodes, len(SIZES), 2, here=True, average_by=strategy.terms().weighting) as grid:
        return federation.run(strategy, 3, grid=grid, **instruction)


#: by feature, the options that ask for it
WORKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "uniform weights": {"weighting": "uniform"},
    "a server optimizer": {"server_optimizer": "momentum"},
    "a robust rule": {"robust": "median"},
    "kept optimizers": {"momentum_state": "global"},
    "a bound of gradients": {"clip_norm": 0.5},
    "a part of the nodes": {"fraction_train": 0.5},
}


@pytest.mark.parametrize("kind", ["messages", "stacked", "workers"])
@pytest.mark.parametrize("feature", WORKS)
def test_what_it_never_heard_of_works(feature: str, kind: str) -> None:
    options = WORKS[feature]
    instruction: dict[str, Any] = {"momentum": 0.9} if feature == "kept optimizers" else {}
    if kind == "workers" and Pushed(**options).why_single:
        kind = "messages"
    by_hand = run(ByHand(**options, fraction_evaluate=0.0), **instruction)
    assert distance(run(Pushed(**options, fraction_evaluate=0.0), kind, **instruction), by_hand) < 1e-9


@pytest.mark.parametrize("parents", [(FedBN, FedTAN), (FedTAN, FedBN)])
def test_a_method_may_be_made_of_two(parents: tuple[type[FedAvg], ...]) -> None:
    both: Any = type("Both", parents, {})
    after = run(both(fraction_evaluate=0.0))
    assert distance(after, run(FedTAN(fraction_evaluate=0.0))) > 1e-3
    assert distance(after, run(type("Both", parents[::-1], {})(fraction_evaluate=0.0))) == 0


def test_a_group_that_it_shares_excludes_privacy() -> None:
    with pytest.raises(ValueError, match="privacy would not protect sums of gradients, which Pushed shares"):
        Pushed(privacy=Privacy(1.0, 1.0), weighting="uniform")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Pushed, ""),
        (Declared, "it needs single replies for what it looks at"),
        (ByHand, "its own `merge` may look at single replies"),
    ],
)
def test_workers_average_only_what_needs_no_single_replies(kind: type[Pushed], reason: str) -> None:
    assert kind().why_single == reason
