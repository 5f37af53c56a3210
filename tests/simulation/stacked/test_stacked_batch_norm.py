"""BN of stacked clients, side by side: outputs, gradients and statistics are those of each client alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.layerwise import Answer, Requests
from fedbn_flwr.layerwise.shared_batch_norm import SharedBatchNorm, Use
from fedbn_flwr.simulation.stacked.layers import apply_shared
from fedbn_flwr.simulation.stacked.model import Stack
from tests.helpers.engine_comparison import assert_as_alone
from tests.helpers.toys import random_state

CLIENTS, SIZE, CLASSES = 3, 5, 4


class Net(nn.Module):
    """Images, or rows of numbers, through one BN layer."""

    def __init__(self, before: nn.Module, layer: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = before, layer, after

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.after(self.layer(self.before(inputs)).relu())
        return found


class OfAConstant(nn.Module):
    """Normalizes what no client's data change, and adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.BatchNorm1d(3), nn.Linear(3, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        constant = torch.arange(3.0 * SIZE, dtype=inputs.dtype).sin().view(SIZE, 3)
        found: Tensor = self.after(inputs + self.layer(constant))
        return found


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.before, self.after = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.after(self.layer(self.before(self.layer(inputs)).relu()))
        return found


def images(layer: nn.Module, dims: int = 2) -> tuple[nn.Module, Tensor]:
    convolution = nn.Conv2d(1, 4, 3) if dims == 2 else nn.Conv3d(1, 4, 3)
    net = Net(convolution, layer, nn.Sequential(nn.Flatten(), nn.Linear(4 * 2**dims, CLASSES)))
    return net, torch.randn(CLIENTS, SIZE, 1, *[4] * dims)


def rows(layer: nn.Module, length: int = 0) -> tuple[nn.Module, Tensor]:
    shape = (4, length) if length else (4,)
    net = Net(nn.Identity(), layer, nn.Sequential(nn.Flatten(), nn.Linear(4 * max(length, 1), CLASSES)))
    return net, torch.randn(CLIENTS, SIZE, *shape)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "2d": lambda: images(nn.BatchNorm2d(4)),
    "3d": lambda: images(nn.BatchNorm3d(4), dims=3),
    "1d": lambda: rows(nn.BatchNorm1d(4)),
    "1d of sequences": lambda: rows(nn.BatchNorm1d(4), length=3),
    "without affine": lambda: images(nn.BatchNorm2d(4, affine=False)),
    "without statistics": lambda: images(nn.BatchNorm2d(4, track_running_stats=False)),
    "another momentum and eps": lambda: images(nn.BatchNorm2d(4, momentum=0.3, eps=0.1)),
    "used twice": lambda: (Twice(), torch.randn(CLIENTS, SIZE, 4)),
    "of a constant": lambda: (OfAConstant(), torch.randn(CLIENTS, SIZE, 3)),
}
MODES = ("training", "frozen", "statistics no more tracked")


def set_mode(model: nn.Module, mode: str) -> None:
    model.train()
    layer = model.get_submodule("layer")
    if mode == "frozen":
        layer.eval()
    if mode == "statistics no more tracked":
        vars(layer)["track_running_stats"] = False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_that_of_each_alone(case: str, mode: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    model, inputs = model.double(), inputs.double()
    targets = torch.arange(CLIENTS * SIZE).reshape(CLIENTS, SIZE) % CLASSES
    set_mode(model, mode)
    states = [random_state(model, seed) for seed in range(CLIENTS)]
    stack = Stack(model, states)
    for _ in range(2):
        losses = stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy)
    losses.sum().backward()
    assert_as_alone(stack, losses, states, (inputs, targets), F.cross_entropy, passes=2)


def test_some_clients_move_only_their_own_statistics() -> None:
    model, inputs = images(nn.BatchNorm2d(4))
    stack = Stack(model.train(), [model.state_dict()] * CLIENTS)
    targets = torch.zeros(2, SIZE, dtype=torch.int64)
    stack.losses(slice(0, 2), (inputs[:2], targets), F.cross_entropy)
    stack.losses(torch.tensor([0]), (inputs[:1], targets[:1]), F.cross_entropy)
    kept = dict(stack.named_buffers())
    assert kept["layer.num_batches_tracked"].tolist() == [2, 1, 0]
    assert kept["layer.running_mean"].abs().sum(1).gt(0).tolist() == [True, True, False]
    stack.losses(slice(1, 3), (inputs[1:], targets), F.cross_entropy)
    assert dict(stack.named_buffers())["layer.num_batches_tracked"].tolist() == [2, 2, 1]


def channels_normalized(model: nn.Module, inputs: Tensor) -> list[int]:
    """Of every call of torch's function."""
    stack, found = Stack(model.train(), [model.state_dict()] * CLIENTS), list[int]()
    plain = F.batch_norm

    def counting(values: Tensor, *arguments: Any) -> Tensor:
        found.append(values.shape[1])
        return plain(values, *arguments)

    with patch.object(F, "batch_norm", counting):
        stack.losses(slice(0, CLIENTS), (inputs, torch.zeros(CLIENTS, SIZE, dtype=torch.int64)), F.cross_entropy)
    return found


def test_all_clients_are_in_one_call() -> None:
    assert channels_normalized(*images(nn.BatchNorm2d(4))) == [4 * CLIENTS]


def test_a_torch_without_what_is_needed_does_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.layers._functorch", None)
    assert channels_normalized(*images(nn.BatchNorm2d(4))) == [4]


@pytest.mark.parametrize("affine", [True, False])
def test_a_shared_layer_is_what_torchs_own_vmap_makes_of_it(affine: bool) -> None:
    inputs, seen = torch.randn(CLIENTS, SIZE, 4, 3, 3, dtype=torch.float64), torch.randn(CLIENTS, SIZE, 4, 3, 3)
    weight, bias = torch.rand(2, CLIENTS, 4, dtype=torch.float64) if affine else (None, None)
    leaves = [value.requires_grad_() for value in (inputs, weight, bias) if value is not None]

    def outcome(apply: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        asked: list[Tensor] = []

        def exchange(request: Requests) -> Answer:
            asked.append(request.tensor)
            return Answer(request.tensor * 1.5, request.counts[0] * 7)

        def layer(values: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
            return apply(values, *(parameters or (None, None)), 1e-3, Use("layer", exchange, "fused"))

        places: Any = (0, 0, 0, None)
        outputs, *statistics = torch.func.vmap(layer, out_dims=places)(*leaves)
        return [outputs, *statistics, *torch.autograd.grad((outputs * seen).sum(), leaves), *asked]

    here, there = outcome(apply_shared), outcome(SharedBatchNorm.apply)
    assert len(here) == len(there) == 6 + len(leaves)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


def test_other_layers_and_other_stand_ins_are_left_alone() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * 2

    assert channels_normalized(*images(Own(4))) == [4]
    model, inputs = images(nn.BatchNorm2d(4))
    layer = model.get_submodule("layer")
    mine = layer.forward
    layer.forward = mine
    assert channels_normalized(model, inputs) == [4]
    assert layer.__dict__["forward"] is mine


def test_outside_of_a_pass_the_layers_are_their_own() -> None:
    model, inputs = images(nn.BatchNorm2d(4))
    stack = Stack(model.train(), [model.state_dict()] * CLIENTS)
    with pytest.raises(RuntimeError):
        stack.losses(slice(0, CLIENTS), (inputs[..., :1], torch.zeros(CLIENTS, SIZE, dtype=torch.int64)), F.nll_loss)
    assert "forward" not in model.get_submodule("layer").__dict__
