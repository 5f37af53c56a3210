"""The same run on the sequential engine and on the stacked one, and what both must have in
common.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedbn_flwr.simulation.stacked.stacked_grid as engine
from fedbn_flwr import state, wire
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.how_trained import APART
from fedbn_flwr.simulation.in_process import InProcessGrid, RunConfig
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.stacked.train_together import train_together
from fedbn_flwr.state import State
from fedbn_flwr.strategies import BaseStrategy
from tests.helpers.harness import Federation, distance, make_model

#: the largest difference between engines in float64
EXACT = 1e-10

#: clients whose batches have the same number of samples, with others between them
SIZES_APART = (3, 4, 2, 4)

#: rounds of a comparison: in the second one, there is something to remember
ROUNDS = 2


class Stacked(StackedGrid):
    """A grid that stacks all clients that can be stacked."""

    most: ClassVar[int] = 20

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: RunConfig | None = None
    ) -> None:
        super().__init__(client_app, num_nodes, run_config, chunk=self.most)


def stacked_by(number: int) -> type[Stacked]:
    """Return a grid that stacks at most so many clients at once."""

    class Few(Stacked):
        most = number

    return Few


@dataclass
class Watch:
    """What happened in a run."""

    #: the number of clients of each stack that came to its end
    stacks: list[int] = field(default_factory=list)
    records: list[logging.LogRecord] = field(default_factory=list)

    @property
    def messages(self) -> list[str]:
        """All that was logged."""
        return [record.getMessage() for record in self.records]

    @property
    def warnings(self) -> list[str]:
        """The messages that a user sees who does not ask for more."""
        return [record.getMessage() for record in self.records if record.levelno >= logging.WARNING]

    @property
    def reasons(self) -> list[str]:
        """The reasons why clients were not stacked, from the log."""
        return [text.removeprefix(APART) for text in self.messages if text.startswith(APART)]


@contextmanager
def watching() -> Iterator[Watch]:
    """Record the sizes of stacks and the messages of Flower's logger."""
    watch = Watch()

    def spy(jobs: Any, *others: Any) -> Any:
        replies = train_together(jobs, *others)
        watch.stacks.append(len(jobs))
        return replies

    logger = logging.getLogger("flwr")
    keeper = logging.Handler()
    keeper.emit = watch.records.append  # type: ignore[assignment, method-assign]
    logger.addHandler(keeper)
    level = logger.level
    # the console command may have been run in this process before, and have turned the level up
    logger.setLevel(logging.INFO)
    try:
        with mock.patch.object(engine, "train_together", spy):
            yield watch
    finally:
        logger.removeHandler(keeper)
        logger.setLevel(level)


@dataclass
class Side:
    """A run on one engine."""

    nodes: Federation
    strategy: BaseStrategy
    final: State
    watch: Watch

    def losses(self) -> State:
        """Return the training losses of the last round, by partition; none after a pass."""
        training = self.strategy.training
        if not training.instruction.trains:
            return {}
        return {
            str(reply.partition): torch.tensor(reply.metrics[wire.TRAIN_LOSS], dtype=torch.float64)
            for reply in training.replies
        }


def quiet(strategy: type[BaseStrategy], **options: Any) -> BaseStrategy:
    """Return a strategy that takes any number of nodes and does not evaluate."""
    few = {"min_train_nodes": 1, "min_evaluate_nodes": 0, "min_available_nodes": 1}
    return strategy(**{"fraction_evaluate": 0.0, **few, **options})


def run(
    grid: type[InProcessGrid],
    strategy: BaseStrategy,
    model: Callable[[], nn.Module] = make_model,
    *,
    rounds: int = ROUNDS,
    nodes: dict[str, Any] | None = None,
    **instruction: Any,
) -> Side:
    """Run on one engine; `nodes` are further arguments of the federation."""
    federation = Federation(model(), grid=grid, **(nodes or {}))
    with watching() as watch:
        final = federation.run(strategy, rounds, **instruction)
    return Side(federation, strategy, final, watch)


def both(
    make: Callable[[], BaseStrategy],
    model: Callable[[], nn.Module] = make_model,
    *,
    grid: type[InProcessGrid] = Stacked,
    **options: Any,
) -> tuple[Side, Side]:
    """Run on the sequential engine, and on the stacked one."""
    return run(InProcessGrid, make(), model, **options), run(grid, make(), model, **options)


def memories(grid: InProcessGrid | WorkersGrid) -> list[dict[str, State]]:
    """Return the arrays that every node keeps."""
    contexts = [grid.context(node) for node in grid.get_node_ids()]
    return [
        {name: state.from_record(kept) for name, kept in each.state.array_records.items()}
        for each in contexts
    ]


def memory_difference(one: list[dict[str, State]], other: list[dict[str, State]]) -> float:
    """Return the largest difference of what nodes keep."""
    assert [each.keys() for each in one] == [each.keys() for each in other]
    pairs = zip(one, other, strict=True)
    return max(
        (distance(kept[name], too[name]) for kept, too in pairs for name in kept), default=0.0
    )


def difference(one: Side, other: Side) -> float:
    """Return the largest difference of final states, memories and losses, relative to the larger of
    1 and the value.
    """
    kept = memory_difference(memories(one.nodes.grid), memories(other.nodes.grid))
    return max(distance(one.final, other.final), distance(one.losses(), other.losses()), kept)


def assert_stacked(side: Side, clients: int) -> None:
    """Check that clients trained in stacks so many times, and no client outside a stack."""
    assert not side.watch.reasons
    assert sum(side.watch.stacks) == clients
    assert not [text for text in side.watch.messages if "common step failed" in text]


def assert_same(
    make: Callable[[], BaseStrategy],
    model: Callable[[], nn.Module] = make_model,
    *,
    clients: int = 0,
    within: float = EXACT,
    **options: Any,
) -> tuple[Side, Side]:
    """Check that both engines agree, and that the second one stacked all four nodes in every round
    (or `clients`).
    """
    alone, together = both(make, model, **options)
    assert_stacked(together, clients or 4 * options.get("rounds", ROUNDS))
    found = difference(alone, together)
    print(f"largest difference {found:.1e}")
    assert found < within
    return alone, together


def asked(nodes: Federation, instruction: wire.Instruction, **records: Any) -> list[Message]:
    """Return a training message to every node."""
    kind = "train" if instruction.layerwise == "none" else wire.LAYERWISE
    content = {wire.CONFIG: instruction.to_config(), wire.ARRAYS: nodes.initial, **records}
    return [Message(RecordDict(content), node, kind) for node in nodes.grid.get_node_ids()]
