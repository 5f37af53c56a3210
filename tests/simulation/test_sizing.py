"""How many clients are stacked."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.client import BNClient
from fedbn_flwr.data import Split
from fedbn_flwr.device import total_memory
from fedbn_flwr.simulation.sizing import (
    StepMemory,
    clients_that_fit,
    largest_useful_stack,
)
from fedbn_flwr.wire import Instruction

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL, LARGE = StepMemory((50_000, 150_000) * 20, 0), StepMemory((50_000, 150_001), 0)


class Square(nn.Module):
    """A layer whose backward pass needs its input and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the square of a linear function."""
        outputs: torch.Tensor = self.layer(inputs.flatten(1))
        return outputs.square()


def client_of(model: nn.Module, samples: int, **options: Any) -> BNClient:
    return BNClient(
        model, six_pixels(samples), num_classes=3, device="cpu", loss_function=_sum, **options
    )


def six_pixels(samples: int) -> Split:
    return Split(torch.ones(samples, 1, 2, 3), torch.zeros(samples, dtype=torch.int64))


def _sum(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def test_a_steps_memory_is_what_its_forward_pass_keeps_beside_the_parameters() -> None:
    step = StepMemory.of(client_of(Square(), 5), Instruction(batch_size=5))
    # 5 samples of 6 inputs, and of 3 outputs that are squared, of 4 bytes
    assert sorted(step.activations) == [4 * 5 * 3, 4 * 5 * 6]
    assert step.state == 4 * 6 * 3
    assert step.total == 2 * 4 * 5 * 9 + 6 * 4 * 18


def test_a_client_that_cannot_train_needs_its_state_only() -> None:
    assert StepMemory.of(client_of(nn.Linear(7, 3), 5), Instruction(batch_size=5)) == StepMemory(
        (), 4 * 8 * 3
    )


def test_as_many_are_stacked_as_fit_into_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into a quarter of a GPU's, which also has it as a captured step."""
    step = StepMemory((10, 20), 7)
    monkeypatch.setattr("fedbn_flwr.simulation.sizing.total_memory", lambda _: 9 * step.total)
    assert [clients_that_fit(step, device) for device in (CPU, CUDA)] == [4, 2]
    monkeypatch.setattr("fedbn_flwr.simulation.sizing.total_memory", lambda _: 0)
    assert clients_that_fit(step, CPU) == 1


@pytest.mark.parametrize(
    ("limit", "total"), [("4096\n", 4096), (f"{1 << 60}\n", None), ("max\n", None), (None, None)]
)
def test_a_container_has_no_more_memory_than_its_limit(
    limit: str | None, total: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(path: Path) -> str:
        assert str(path) == "/sys/fs/cgroup/memory.max"
        if limit is None:
            raise FileNotFoundError(path)
        return limit

    monkeypatch.setattr(Path, "read_text", limited)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_memory.__wrapped__(CPU) == (total or physical)


def never() -> StepMemory:
    raise AssertionError("a forward pass that nobody needs")


@pytest.mark.parametrize(
    ("device", "parameters", "step", "plain", "layerwise"),
    [
        (CPU, 1_000_000, lambda: SMALL, 20, 20),
        # stacks of tiny steps may be larger
        (CPU, 1_000_000, lambda: StepMemory((50_000,) * 8, 30_000), 65, 65),
        (CPU, 1_000_000, lambda: StepMemory((10,), 1), 100, 100),
        (CPU, 1_000_001, never, 1, 1),
        # large activations are stacked in fives, and only where steps are layer-wise
        (CPU, 1, lambda: LARGE, 1, 5),
        # a GPU stacks all that are prepared together, whatever their size: its memory decides
        (CUDA, 100_000_000, never, 100, 100),
    ],
    ids=["small", "smaller", "tiny", "many parameters", "large activations", "gpu"],
)
def test_the_largest_useful_stack(
    device: torch.device,
    parameters: int,
    step: Callable[[], StepMemory],
    plain: int,
    layerwise: int,
) -> None:
    model = nn.Linear(parameters, 1, bias=False, device="meta")
    assert largest_useful_stack(model, device, step) == plain
    assert largest_useful_stack(model, device, step, layerwise=True) == layerwise
