"""Stacks that the device has no memory for."""

from functools import partial
from pathlib import Path
from typing import Any

import fake_accelerator  # type: ignore[import-not-found]
import pytest
from torch import Tensor, nn

from fedbn_flwr.models import build
from fedbn_flwr.simulation.in_process import OneByOneGrid
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedTAN
from tests.helpers.engine_comparison import EXACT, Side, Stacked, quiet, run, stacked_by
from tests.helpers.harness import CLASSES, Double, distance

SIZES = (8, 8, 8, 8)


#: with more than a million parameters, so that a CPU would not stack them
LARGE = ("resnet18", "timm:tf_efficientnet_lite0")


def ended(strategy: type[BaseStrategy], model: str, grid: type = Stacked) -> Side:
    nodes = {"sizes": SIZES, "device": "fake"}
    if not model:
        return run(grid, quiet(strategy), rounds=3, nodes=nodes, batch_size=8)
    make = partial(make_large, model)
    few: dict[str, Any] = {"rounds": 2, "local_steps": 1, "lr": 0.001}
    return run(grid, quiet(strategy), make, nodes=nodes, batch_size=8, **few)


def make_large(name: str) -> nn.Module:
    return Double(build(name, CLASSES, 1, 4 if name.startswith("timm") else 8))


def largest_of(stack: int, model: str) -> int:
    """Return the bytes of the largest tensor that a stack of so many clients makes."""
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_accelerator, "_refuse_large", note)
        ended(FedAvg, model, stacked_by(stack))
    return max(sizes)


@pytest.mark.parametrize(
    ("fits", "stacks", "most"), [(4, [4, 4, 4], 0), (2, [2] * 6, 2), (1, [], 1)]
)
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        (FedAvg, ""),
        pytest.param(FedTAN, "", marks=pytest.mark.slow),
        *(pytest.param(FedAvg, name, marks=pytest.mark.slow) for name in LARGE),
    ],
)
@pytest.mark.sampled(2)
def test_a_stack_that_does_not_fit_is_halved(
    strategy: type[BaseStrategy],
    model: str,
    fits: int,
    stacks: list[int],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    wanted = ended(strategy, model, OneByOneGrid)
    monkeypatch.setattr(fake_accelerator, "largest", largest_of(fits, model))
    side = ended(strategy, model)
    assert distance(side.final, wanted.final) < EXACT
    how = side.nodes.grid.how_trained()
    assert how.most == most
    smaller = [text for text in side.watch.warnings if "smaller stacks" in text]
    assert len(smaller) == {4: 0, 2: 1, 1: 2}[fits]
    assert len(how.alone) == len(smaller)
    # of large models, the sum of the replies may be what does not fit
    if strategy is FedAvg and not model:
        assert side.watch.stacks == stacks
    # a run that goes on from here has the same stacks
    side.nodes.grid.save_states(tmp_path)
    again = ended(strategy, model)
    again.nodes.grid.restore_states(tmp_path)
    assert again.nodes.grid.how_trained().most == most
