"""Stacks that the device has no memory for."""

from pathlib import Path

import fake_accelerator  # type: ignore[import-not-found]
import pytest
from torch import Tensor

from fedbn_flwr.simulation.in_process import OneByOneGrid
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedTAN
from tests.helpers.engine_comparison import EXACT, Side, Stacked, quiet, run, stacked_by
from tests.helpers.harness import distance

SIZES = (8, 8, 8, 8)


def ended(strategy: type[BaseStrategy], grid: type = Stacked) -> Side:
    nodes = {"sizes": SIZES, "device": "fake"}
    return run(grid, quiet(strategy), rounds=3, nodes=nodes, batch_size=8)


def largest_of(stack: int) -> int:
    """Return the bytes of the largest tensor that a stack of so many clients makes."""
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_accelerator, "_refuse_large", note)
        ended(FedAvg, stacked_by(stack))
    return max(sizes)


@pytest.mark.parametrize(
    ("fits", "stacks", "most"), [(4, [4, 4, 4], 0), (2, [2] * 6, 2), (1, [], 1)]
)
@pytest.mark.parametrize("strategy", [FedAvg, FedTAN])
def test_a_stack_that_does_not_fit_is_halved(
    strategy: type[BaseStrategy],
    fits: int,
    stacks: list[int],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    wanted = ended(strategy, OneByOneGrid)
    monkeypatch.setattr(fake_accelerator, "largest", largest_of(fits))
    side = ended(strategy)
    assert distance(side.final, wanted.final) < EXACT
    how = side.nodes.grid.how_trained()
    assert how.most == most
    smaller = [text for text in side.watch.warnings if "smaller stacks" in text]
    assert len(smaller) == {4: 0, 2: 1, 1: 2}[fits]
    assert len(how.alone) == len(smaller)
    if strategy is FedAvg:
        assert side.watch.stacks == stacks
    # a run that goes on from here has the same stacks
    side.nodes.grid.save_states(tmp_path)
    again = ended(strategy)
    again.nodes.grid.restore_states(tmp_path)
    assert again.nodes.grid.how_trained().most == most
