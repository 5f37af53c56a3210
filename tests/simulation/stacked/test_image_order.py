"""Stacked images and their gradients have their channels last from layer to layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedbn_flwr import models
from fedbn_flwr.layerwise import Answer, Requests, shared_statistics
from fedbn_flwr.simulation.stacked.layers import ImageOrder, apply_shared
from fedbn_flwr.simulation.stacked.model import Stack
from fedbn_flwr.state import State
from tests.helpers.engine_comparison import assert_as_alone
from tests.helpers.toys import random_state

CLIENTS, SIZE, CHANNELS, SIDE = 3, 5, 4, 6
#: of client, sample, channel, row and column
LAST = (CHANNELS, CLIENTS * CHANNELS * SIDE * SIDE, 1, CLIENTS * CHANNELS * SIDE, CLIENTS * CHANNELS)


def chain(in_place: bool = True) -> nn.Sequential:
    """Two convolutions with BN, and a mean over positions."""
    first, second = nn.Conv2d(2, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    body = nn.Sequential(
        *(first, nn.BatchNorm2d(CHANNELS), nn.ReLU(in_place), second, nn.BatchNorm2d(CHANNELS), nn.ReLU(in_place))
    )
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 4))


def some_states(model: nn.Module) -> list[State]:
    return [random_state(model, seed) for seed in range(CLIENTS)]


def example(model: nn.Module, size: int = SIZE) -> tuple[Stack, Tensor, Tensor]:
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(CLIENTS, size, 2, SIDE, SIDE, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return Stack(model, some_states(model)), inputs, torch.arange(CLIENTS * size).reshape(CLIENTS, size) % 4


def scaled(request: Requests) -> Answer:
    return Answer(request.tensor * 1.5, request.counts[0])


class Activations(TorchDispatchMode):
    """Notes the strides of gradients and outputs where activations are differentiated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gradients: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.threshold_backward.default:
            self.gradients.append(args[0].stride())
            self.outputs.append(args[1].stride())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_activations_and_gradients_have_the_channels_of_all_clients_side_by_side(in_place: bool, shared: bool) -> None:
    model = chain(in_place)
    stack, inputs, targets = example(model)
    around: dict[str, Any] = {}
    if shared:
        around = {"around": lambda: shared_statistics(model, scaled, "fused", apply=apply_shared)}
    loss = stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy, **around).sum()
    with Activations() as seen:
        loss.backward()
    assert seen.outputs == seen.gradients == [LAST] * 2


def operations(loss: Tensor) -> set[str]:
    """The names of all operations of a backward pass."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        nodes += [source for source, _ in node.next_functions if source is not None and source not in nodes]
    return {type(node).__name__ for node in nodes}


def test_what_bn_puts_out_is_no_view_that_changes_in_place() -> None:
    """The gradient of such a change copies that of the view, into the usual order and back."""
    stack, inputs, targets = example(chain(in_place=True))
    names = operations(stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy).sum())
    assert {"NativeBatchNormBackward0", "ReluBackward0"} <= names
    assert "CopySlices" not in names


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_order_changes_no_more_than_rounding(in_place: bool, size: int) -> None:
    model = chain(in_place).double()
    stack, inputs, targets = example(model, size)
    losses = stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy)
    losses.sum().backward()
    assert_as_alone(stack, losses, some_states(model), (inputs, targets), F.cross_entropy, passes=1)


def test_layers_that_do_not_learn_come_first() -> None:
    model = chain()
    for layer in model[0][:2]:  # type: ignore[index]
        layer.requires_grad_(False)
    stack, inputs, targets = example(model)
    stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy).sum().backward()
    assert [name for name, value in stack.named_parameters() if value.grad is None] == [
        *("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias")
    ]


def test_no_hook_stays_behind() -> None:
    model = chain()
    stack, inputs, targets = example(model)
    stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy)
    assert not any(layer._forward_hooks for layer in model.modules())


class Own(nn.Module):
    """A forward of its own, which may need the usual order."""

    def forward(self, images: Tensor) -> Tensor:
        return images.view(len(images), -1)


def test_only_images_of_a_chain_of_torchs_own_layers_change_their_order() -> None:
    images = torch.randn(CLIENTS, SIZE, 2, SIDE, SIDE)
    others = nn.GroupNorm(2, 4), nn.Dropout2d(), Own()
    for layer in others:
        assert ImageOrder(nn.Sequential(nn.Conv2d(2, 4, 1), layer)).images(images) is images
    assert ImageOrder(nn.Sequential(nn.Flatten(), nn.Linear(72, 4))).images(images) is images
    order = ImageOrder(chain())
    assert order.images(images).stride() == (2, 2 * CLIENTS * SIDE * SIDE, 1, 2 * CLIENTS * SIDE, 2 * CLIENTS)
    assert torch.equal(order.images(images), images)
    volumes = torch.randn(CLIENTS, SIZE, 2, 3, 3, 3)
    assert order.images(volumes) is volumes


@pytest.mark.parametrize("name", ["small-cnn", "fedbs-mnist-cnn"])
def test_models_of_this_project_that_are_such_chains(name: str) -> None:
    images = torch.randn(CLIENTS, SIZE, 1, 28, 28)
    assert ImageOrder(models.build(name, 10, 1, 28)).images(images) is not images


def test_a_torch_without_what_is_needed_keeps_the_usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.layers._functorch", None)
    stack, inputs, targets = example(chain(in_place=False))
    assert ImageOrder(chain()).images(inputs) is inputs
    stack.losses(slice(0, CLIENTS), (inputs, targets), F.cross_entropy).sum().backward()


def test_adaptive_pools_of_such_images_loop_over_no_clients() -> None:
    """Else torch warns of it, which fails any test; outside of a stack, torch's own pool stays as it is."""
    images = torch.randn(CLIENTS, SIZE, 2, SIDE, SIDE)
    for size in (1, (1, 1), (2, 3), (1, None)):
        pool = nn.AdaptiveAvgPool2d(size)
        order = ImageOrder(nn.Sequential(nn.Conv2d(2, 2, 1), pool))
        with order.kept():
            pooled = vmap(pool)(order.images(images))
        torch.testing.assert_close(pooled, torch.stack([pool(each) for each in images]))
    with pytest.warns(UserWarning, match="performance drop"):
        vmap(lambda each: F.adaptive_avg_pool2d(each, 1))(order.images(images))
