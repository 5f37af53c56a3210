"""The losses of stacked models are those of each model alone."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.simulation.stacked.model import Stack
from tests.helpers.engine_comparison import assert_as_alone
from tests.helpers.toys import CLASSES, random_state, toy_cnn

CLIENTS, SIZE = 3, 5
Loss = Callable[[Tensor, Tensor], Tensor]


class PerPixel(nn.Module):
    """A class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, CLASSES, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.convolution(inputs)
        return found


def some_left_out() -> Tensor:
    targets = torch.arange(CLIENTS * SIZE).reshape(CLIENTS, SIZE) % CLASSES
    targets[0, :2] = -100
    targets[2, 4] = -100
    return targets


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


CASES: dict[str, tuple[nn.Module, Tensor, Loss]] = {
    "classes": (toy_cnn(), torch.arange(CLIENTS * SIZE).reshape(CLIENTS, SIZE) % CLASSES, F.cross_entropy),
    "some left out": (toy_cnn(), some_left_out(), F.cross_entropy),
    "probabilities": (toy_cnn(), torch.rand(CLIENTS, SIZE, CLASSES).softmax(-1).double(), F.cross_entropy),
    "pixels": (PerPixel(), torch.randint(CLASSES, (CLIENTS, SIZE, 6, 6)), F.cross_entropy),
    "another loss": (toy_cnn(), torch.arange(CLIENTS * SIZE).reshape(CLIENTS, SIZE) % CLASSES, smoothed),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_each_alone(case: str) -> None:
    model, targets, loss_function = CASES[case]
    model = copy.deepcopy(model).double().train()
    states = [random_state(model, seed) for seed in range(CLIENTS)]
    inputs = torch.randn(CLIENTS, SIZE, 1, 6, 6, dtype=torch.float64)
    stack = Stack(model, states)
    losses = stack.losses(slice(0, CLIENTS), (inputs, targets), loss_function)
    losses.sum().backward()
    assert_as_alone(stack, losses, states, (inputs, targets), loss_function)


def test_the_structure_has_its_own_entries_back() -> None:
    model = toy_cnn()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stack = Stack(model, [model.state_dict()] * 2)
    stack.losses(slice(0, 2), (torch.randn(2, 4, 1, 6, 6), torch.zeros(2, 4, dtype=torch.int64)), F.cross_entropy)
    with pytest.raises(RuntimeError):
        stack.losses(slice(0, 2), (torch.randn(2, 4, 9), torch.zeros(2, 4, dtype=torch.int64)), F.cross_entropy)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is before[name] for name in before)


def test_tied_entries_stay_tied() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh(), first, nn.Linear(4, 4)).double()
    model[3].weight = first.weight
    states = [random_state(model, seed) for seed in range(2)]
    for values in states:
        values |= {f"{layer}.weight": values["0.weight"] for layer in (2, 3)} | {"2.bias": values["0.bias"]}
    inputs, targets = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[0, 1, 2], [3, 0, 1]])
    stack = Stack(model, states)
    stack.losses(slice(0, 2), (inputs, targets), F.cross_entropy).sum().backward()
    for client, values in enumerate(states):
        model.load_state_dict(values)
        model.zero_grad()
        F.cross_entropy(model(inputs[client]), targets[client]).backward()
        gradient = dict(stack.named_parameters())["0.weight"].grad
        assert gradient is not None
        torch.testing.assert_close(gradient[client], first.weight.grad, rtol=1e-10, atol=1e-14)
