"""A method that names no feature, with both halves and a group of its own: all work with it, or
refuse it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from fedbn_flwr import wire
from fedbn_flwr.client import Rule, Session, register_rule
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedTAN,
    MethodState,
    NodeReply,
    Pooled,
    PooledGroup,
    Privacy,
    Sent,
)
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.registered import registries_restored
from tests.helpers.tellers import engine

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


@dataclass
class PushedState(MethodState):
    push: Arrays = field(default_factory=dict)


class Pushed(FedAvg):
    """v <- beta v + sum_k p_k g_k, w <- sum_k p_k w_k - rate v."""

    sends: ClassVar[tuple[Sent, ...]] = (PooledGroup("sums of gradients", GRADIENTS),)
    state_type: ClassVar[type[MethodState]] = PushedState
    state: PushedState

    def instruct(self, instruction: Instruction) -> Instruction:
        return super().instruct(instruction).with_rule(send_gradients=True)

    def update(self, pooled: Pooled) -> Arrays:
        gradients, push = pooled.groups[GRADIENTS], self.state.push
        self.state.push = {
            name: BETA * push.get(name, 0.0) + value for name, value in gradients.items()
        }
        state = super().update(pooled)
        return {
            **state,
            **{name: state[name] - RATE * value for name, value in self.state.push.items()},
        }


class ByHand(Pushed):
    """The same of single replies, summed by hand."""

    reads_replies = True

    def update(self, pooled: Pooled) -> Arrays:
        groups = {group: self._by_hand(group, pooled.replies) for group in (wire.ARRAYS, GRADIENTS)}
        model = groups.pop(wire.ARRAYS)
        if self.optimizer:  # the only one here is momentum, with a rate of 1
            moments = self.__dict__.setdefault("moments", {})
            for name in groups[GRADIENTS]:
                moments[name] = (
                    0.9 * moments.get(name, 0.0) + model[name] - self.round.current[name]
                )
                model[name] = self.round.current[name] + moments[name]
        return super().update(replace(pooled, model=model, groups=groups))

    def _by_hand(self, group: str, replies: Sequence[NodeReply]) -> Arrays:
        shares = np.array(
            [1.0 if self.weighting == "uniform" else reply.num_examples for reply in replies]
        )
        pooled: Arrays = {}
        for name in replies[0].records[group]:
            rows = np.stack([reply.records[group][name] for reply in replies])
            is_median, is_counter = self.averager.fewest_nodes > 1, rows.dtype.kind != "f"
            middle = (
                np.median(rows, axis=0)
                if is_median
                else np.tensordot(shares / shares.sum(), rows, 1)
            )
            pooled[name] = rows.max(axis=0) if is_counter else middle
        return pooled


def run(strategy: FedAvg, kind: str = "inprocess", **instruction: Any) -> Any:
    federation = Federation(make_model())
    with engine(kind, federation, strategy.weighting) as grid:
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


@pytest.mark.parametrize("kind", ["inprocess", "stacked", "sums", "workers"])
@pytest.mark.parametrize("feature", WORKS)
@pytest.mark.sampled(12)
def test_what_it_never_heard_of_works(feature: str, kind: str) -> None:
    options = WORKS[feature]
    instruction: dict[str, Any] = {"momentum": 0.9} if feature == "kept optimizers" else {}
    if kind in ("sums", "workers") and Pushed(**options).needs_single_replies:
        kind = "inprocess"
    by_hand = run(ByHand(**options, fraction_evaluate=0.0), **instruction)
    assert (
        distance(run(Pushed(**options, fraction_evaluate=0.0), kind, **instruction), by_hand) < 1e-9
    )


@pytest.mark.parametrize("parents", [(FedBN, FedTAN), (FedTAN, FedBN)])
def test_a_method_may_be_made_of_two(parents: tuple[type[FedAvg], ...]) -> None:
    both: Any = type("Both", parents, {})
    after = run(both(fraction_evaluate=0.0))
    assert distance(after, run(FedTAN(fraction_evaluate=0.0))) > 1e-3
    assert distance(after, run(type("Both", parents[::-1], {})(fraction_evaluate=0.0))) == 0


def test_a_group_that_it_shares_excludes_privacy() -> None:
    with pytest.raises(
        ValueError, match="privacy would not protect sums of gradients, which Pushed shares"
    ):
        Pushed(privacy=Privacy(1.0, 1.0), weighting="uniform")


@pytest.mark.parametrize(
    ("kind", "options", "needs"),
    [
        (Pushed, {}, False),
        (Pushed, {"weighting": "uniform"}, False),
        (ByHand, {}, True),
        (Pushed, {"robust": "median"}, True),
        (FedAvg, {"privacy": Privacy(1.0, 1.0), "weighting": "uniform"}, True),
        (Pushed, {"weighted_by_key": "tokens"}, True),
    ],
)
def test_workers_average_only_what_needs_no_single_replies(
    kind: type[FedAvg], options: dict[str, Any], needs: bool
) -> None:
    assert kind(**options).needs_single_replies is needs
