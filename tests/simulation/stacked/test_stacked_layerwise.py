"""Layer-wise steps of stacked clients: the same models, the same count, and messages where the step
fails.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.layerwise import Answer
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import OwnShare
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedTAN
from fedbn_flwr.transports.counting_grid import CountingGrid
from fedbn_flwr.transports.message_client import STEPS
from fedbn_flwr.transports.message_records import StepPosition
from tests.helpers.engine_comparison import (
    EXACT,
    Stacked,
    asked,
    assert_same,
    both,
    difference,
    quiet,
    run,
    stacked_by,
    watching,
)
from tests.helpers.faults import Without
from tests.helpers.harness import (
    INSTRUCTION,
    SIZES,
    ClientWrapper,
    Federation,
    make_float32_model,
    make_model,
)
from tests.helpers.waiting import wait_until

#: the smallest first batches differ: 7, 8, 8 and 5 samples
RAGGED: dict[str, Any] = {"batch_size": 8}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    STEPS.clear()
    before = threading.active_count()
    yield
    STEPS.clear()
    assert wait_until(lambda: threading.active_count() <= before + 1)


def test_small_chunks() -> None:
    """Stacks wait for each other at every layer."""
    assert_same(lambda: quiet(FedTAN), grid=stacked_by(2), batch_size=4)


@pytest.mark.parametrize(("strategy", "stacks"), [(FedTAN, [2, 1, 1]), (FedAvg, [])])
def test_steps_with_large_activations_are_stacked_only_where_they_are_layerwise(
    strategy: type[BaseStrategy], stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.sizing._LARGE_ACTIVATIONS", 0)
    monkeypatch.setattr("fedbn_flwr.simulation.sizing._LARGEST_LAYERWISE", 2)
    alone, together = both(lambda: quiet(strategy), grid=stacked_by(0), rounds=1, batch_size=4)
    assert difference(alone, together) < EXACT
    assert together.watch.stacks == stacks


@pytest.mark.parametrize(("fitting", "stacks"), [(2, 4), (1, 0)])
def test_a_step_of_more_than_there_is_memory_for_is_taken_by_messages(
    fitting: int, stacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which steps are replayed, and so need not all be kept."""
    monkeypatch.setattr(
        "fedbn_flwr.simulation.stacked.stacked_grid.clients_that_fit", lambda *_: fitting
    )
    alone, together = both(lambda: quiet(FedTAN), rounds=1)
    assert difference(alone, together) < EXACT
    assert sum(together.watch.stacks) == stacks


def counted(
    grid: type[InProcessGrid],
    strategy: BaseStrategy,
    wrap: ClientWrapper = lambda client, _: client,
    **options: Any,
) -> CountingGrid:
    nodes = Federation(make_model(), grid=grid, wrap=wrap)
    counting = CountingGrid(nodes.grid)
    nodes.run(strategy, 2, grid=counting, **options)
    return counting


def poisoned(
    change: Callable[[torch.Tensor, torch.Tensor], object], partition: int = 1
) -> ClientWrapper:
    """One client's data are not what they should be."""

    def wrap(client: Any, index: int) -> Any:
        if index == partition:
            split = client.train_split
            inputs, labels = split.inputs.clone(), split.labels.clone()
            change(inputs, labels)
            client.train_split = replace(split, inputs=inputs, labels=labels)
        return client

    return wrap


POISONS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "says no number": (lambda inputs, _: inputs.fill_(float("nan")), "is not finite"),
    "says a number that is too large": (
        lambda inputs, _: inputs.fill_(1e25),
        "is too large to be pooled in float32",
    ),
    "raises at the loss": (lambda _, labels: labels.fill_(99), "out of bounds"),
}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, {}) for case in POISONS),
        ("says no number", {"momentum_state": "local"}),
        ("raises at the loss", {"exchange": "paper"}),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_a_fault_in_the_middle_goes_to_messages(case: str, options: dict[str, Any]) -> None:
    """They find out who it was, and the round is that of the others.

    Nobody remembers the common step.
    """
    change, said = POISONS[case]
    nodes = {"wrap": poisoned(change)}
    make = partial(quiet, FedTAN, **options)
    alone, together = both(make, make_float32_model, rounds=2, nodes=nodes, momentum=0.9)
    assert difference(alone, together) == 0
    assert [reply.partition for reply in together.strategy.training.replies] == [0, 2, 3]
    others = run(Without, make(), make_float32_model, rounds=2, momentum=0.9).final
    assert all(torch.equal(together.final[name], others[name]) for name in others)
    assert not together.watch.stacks
    failed = [text for text in together.watch.messages if "common step failed" in text]
    assert failed
    assert all(said in text for text in failed)
    named = [
        text for text in together.watch.messages if "Node 1001 is left out of this round" in text
    ]
    assert len(named) == 2
    by_messages, first_together = (
        counted(grid, make(), **nodes, momentum=0.9) for grid in (InProcessGrid, Stacked)
    )
    assert vars(by_messages.training) == vars(first_together.training)


def stacked_nodes(partitions: Sequence[int]) -> StackedGrid:
    """Return some of the federation's nodes, one of which has values whose squares overflow."""
    nodes = Federation(
        make_float32_model(), wrap=poisoned(POISONS["says a number that is too large"][0])
    )
    return StackedGrid(client_app(nodes.client), len(SIZES), partitions=partitions)


def test_too_large_values_in_one_of_several_workers() -> None:
    with WorkersGrid(stacked_nodes, len(SIZES), 2, start=OwnShare) as grid, watching() as watch:
        together = Federation(make_float32_model()).run(quiet(FedTAN), 2, grid)
    assert (
        len([text for text in watch.messages if "Node 1001 is left out of this round" in text]) == 2
    )
    others = run(Without, quiet(FedTAN), make_float32_model, rounds=2).final
    assert all(torch.equal(together[name], others[name]) for name in others)


class Broken(StackedGrid):
    """A grid with a mistake, which its clients do not make one by one."""

    def _train_in_step(self, *_: Any) -> Any:
        raise KeyError("a mistake")


def broken_nodes(partitions: Sequence[int]) -> StackedGrid:
    return Broken(client_app(Federation(make_model()).client), len(SIZES), partitions=partitions)


@pytest.mark.parametrize("workers", [False, True])
def test_an_engine_with_a_mistake_ends_the_run(workers: bool) -> None:
    """And goes not on by messages for ever, as one does that cannot take the step at all."""
    grid = (
        WorkersGrid(broken_nodes, len(SIZES), 2, start=OwnShare)
        if workers
        else broken_nodes(range(len(SIZES)))
    )
    with pytest.raises(Exception, match="a mistake"):
        Federation(make_model()).run(quiet(FedTAN), 2, grid)


def test_a_node_without_data_is_named() -> None:
    alone, together = both(lambda: quiet(FedTAN), rounds=2, nodes={"sizes": (7, 0, 5)})
    assert difference(alone, together) == 0
    assert [reply.partition for reply in together.strategy.training.replies] == [0, 2]
    assert any("Node 1001 is left out" in text for text in together.watch.messages)


def test_an_instruction_that_cannot_be_planned_is_an_error_of_the_nodes() -> None:
    for strategy in (FedTAN, FedAvg):
        with pytest.raises(
            Exception, match=r"no node could train in round 1: node 1000: .*batch-size"
        ):
            run(Stacked, quiet(strategy), batch_size=0)


def test_a_client_that_fails_leaves_the_shared_model_to_the_others() -> None:
    """Also where its error is kept, as the log's records are here."""
    change, _ = POISONS["raises at the loss"]
    alone = run(
        InProcessGrid,
        quiet(FedTAN, carry=True),
        make_float32_model,
        nodes={"wrap": poisoned(change)},
    )
    others = run(Without, quiet(FedTAN, carry=True), make_float32_model)
    assert all(torch.equal(alone.final[name], others.final[name]) for name in others.final)


def opened(advances: int) -> tuple[Federation, Any]:
    nodes = Federation(make_model(), grid=Stacked)
    instruction = replace(
        INSTRUCTION, server_round=1, layerwise="fused", momentum=0.9, momentum_state="local"
    )
    assert isinstance(nodes.grid, StackedGrid)
    step = nodes.grid.open_step(asked(nodes, instruction, **StepPosition(1).pack()))
    assert step is not None
    assert [participant.num_examples for participant in step.participants] == list(SIZES)
    said = step.advance()
    for _ in range(advances):
        assert said is not None
        said = step.advance(Answer(said.tensor.mean(0), sum(said.counts)))
    return nodes, step


@pytest.mark.parametrize("advances", [0, 1, 3, 4])
def test_what_is_abandoned_leaves_nothing(advances: int) -> None:
    """Not even at its end, as long as nobody asks for the replies."""
    nodes, step = opened(advances)
    step.abandon()
    assert all(not nodes.grid.context(node).state for node in nodes.grid.get_node_ids())


def test_a_step_that_is_dropped_ends_its_threads() -> None:
    before = threading.active_count()
    _, step = opened(1)
    assert threading.active_count() > before
    del step
    assert wait_until(lambda: threading.active_count() == before)
