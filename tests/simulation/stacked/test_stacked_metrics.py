"""Numbers that a rule reports: the same from a stack as from each client alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from fedbn_flwr import compare, wire
from fedbn_flwr.client import Rule, Session, register_rule
from fedbn_flwr.server.pooling import Pooled
from fedbn_flwr.state import Arrays
from fedbn_flwr.strategies import FedAvg, FedBS
from fedbn_flwr.wire import Instruction
from tests.helpers.engine_comparison import quiet
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.registered import registries_restored
from tests.helpers.runs import DATA, OPTIONS
from tests.helpers.tellers import engine


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Forget what a test registers, and register a rule that reports what it has seen."""
    with registries_restored():

        @register_rule
        class Counting(Rule):
            counting: float = 0.0

            def finish(self, session: Session) -> None:
                norms = [value.detach().square() for value in session.learned().values()]
                rows = 1 if session.stacked else 0
                squares = sum(norm.flatten(rows).sum(-1) for norm in norms)
                assert isinstance(squares, torch.Tensor)
                session.metrics["steps-taken"] = session.steps  # type: ignore[assignment]
                session.metrics["asked"] = self.counting
                session.metrics["square"] = squares if session.stacked else float(squares)  # type: ignore[assignment]

        yield


class Counts(FedAvg):
    """FedAvg that reads its nodes' numbers."""

    reads_replies = True
    seen: dict[int, dict[str, Any]]

    def instruct(self, instruction: Instruction) -> Instruction:
        """Ask for the numbers."""
        return super().instruct(instruction).with_rule(counting=2.0)

    def update(self, pooled: Pooled) -> Arrays:
        """Keep the numbers."""
        names = ("steps-taken", "asked", "square")
        self.seen = {
            reply.partition: {name: reply.metrics[name] for name in names}
            for reply in pooled.replies
        }
        return super().update(pooled)


@pytest.mark.parametrize("loss", ["local", "received"])
def test_losses_on_all_data_are_those_of_clients_alone(loss: Literal["local", "received"]) -> None:
    ends, deviations = [], []
    for kind in ("inprocess", "stacked"):
        federation = Federation(make_model())
        strategy = quiet(FedBS, epsilon=0.0, loss=loss)
        with engine(kind, federation) as grid:
            ends.append(federation.run(strategy, 2, grid, local_steps=2))
        deviations.append(strategy.training.measured["loss-deviation"])
    assert distance(*ends) < 1e-12
    assert deviations[0] == pytest.approx(deviations[1], rel=1e-12)


@pytest.mark.parametrize(
    "work", [{"local_steps": 2}, {"local_steps": 0, "local_epochs": 1}], ids=["steps", "epochs"]
)
def test_they_are_those_of_clients_alone(work: dict[str, int]) -> None:
    seen = {}
    for kind in ("inprocess", "stacked"):
        federation, strategy = Federation(make_model()), quiet(Counts)
        assert isinstance(strategy, Counts)
        with engine(kind, federation) as grid:
            federation.run(strategy, 1, grid, **work)
        seen[kind] = strategy.seen
    assert seen["stacked"].keys() == seen["inprocess"].keys()
    for partition, numbers in seen["inprocess"].items():
        assert seen["stacked"][partition] == pytest.approx(numbers, rel=1e-12)
    taken = {numbers["steps-taken"] for numbers in seen["stacked"].values()}
    assert (len(taken) == 1) == ("local_epochs" not in work)
    assert wire.PARTITION_ID not in seen["stacked"][0]


def test_what_a_users_method_raises_is_told_with_its_kind_and_line(tmp_path: Path) -> None:
    class Wrong(FedAvg):
        """Reads a number that nobody sends."""

        reads_replies = True

        def update(self, pooled: Pooled) -> Arrays:
            raise KeyError("steps-taken")

    options: dict[str, Any] = {
        key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "dataset"
    }
    found = compare([Wrong], data=DATA, folder=tmp_path, **options)
    (reason,) = found.failures.values()
    assert reason.startswith("KeyError: 'steps-taken' (")
    assert reason.endswith(
        f"{Path(__file__).name}, line {Wrong.update.__code__.co_firstlineno + 1})"
    )
