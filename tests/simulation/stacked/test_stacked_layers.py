"""Layers and losses of stacked clients: outputs, gradients and statistics are those of each client
alone.
"""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedbn_flwr import models
from fedbn_flwr.simulation.stacked.model import Stack
from fedbn_flwr.simulation.stacked.stacked_layers import StackedLayers
from tests.helpers.toys import random_state

CLIENTS, SIZE, CLASSES, CHANNELS, SIDE = 3, 5, 4, 4, 6
LABELS = torch.arange(CLIENTS * SIZE).reshape(CLIENTS, SIZE) % CLASSES


class Twice(nn.Module):
    """One layer, used twice, and another one of what no client's data change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.constant, self.after = (
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4),
            nn.Linear(4, CLASSES),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        constant = torch.arange(4.0 * SIZE, dtype=inputs.dtype).sin().view(SIZE, 4)
        found: Tensor = self.after(self.layer(self.layer(inputs).relu()) + self.constant(constant))
        return found


def around(layer: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    """Return a network of this layer for images, volumes, or rows of these many values, and
    inputs.
    """
    before: dict[int, nn.Module] = {
        2: nn.Conv2d(1, 4, 3, padding=1),
        3: nn.Conv3d(1, 4, 3, padding=1),
    }
    first = before.get(len(shape), nn.Identity())
    after = nn.Flatten(), nn.LazyLinear(CLASSES)
    model, inputs = (
        nn.Sequential(first, layer, nn.ReLU(), *after),
        torch.randn(CLIENTS, SIZE, 1, *shape),
    )
    inputs = (
        inputs
        if len(shape) > 1
        else inputs.expand(-1, -1, 4, *shape) * torch.rand(4, *[1] * len(shape))
    )
    model.eval()(inputs[0])
    return model, inputs


def chain(in_place: bool = True, size: int = SIZE) -> tuple[nn.Sequential, Tensor]:
    """Two convolutions with BN and a mean over positions, whose images get the order "channels
    last".
    """
    first, second = (
        nn.Conv2d(2, CHANNELS, 3, padding=1),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    )
    body = (
        first,
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(in_place),
        second,
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(in_place),
    )
    model = nn.Sequential(
        *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES)
    )
    return model, torch.randn(CLIENTS, size, 2, SIDE, SIDE)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "2d": lambda: around(nn.BatchNorm2d(4), 4, 4),
    "3d": lambda: around(nn.BatchNorm3d(4), 2, 2, 2),
    "1d": lambda: around(nn.BatchNorm1d(4)),
    "1d of sequences": lambda: around(nn.BatchNorm1d(4), 3),
    "without affine": lambda: around(nn.BatchNorm2d(4, affine=False), 4, 4),
    "without statistics": lambda: around(nn.BatchNorm2d(4, track_running_stats=False), 4, 4),
    "another momentum and eps": lambda: around(nn.BatchNorm2d(4, momentum=0.3, eps=0.1), 4, 4),
    "used twice, and of a constant": lambda: (Twice(), torch.randn(CLIENTS, SIZE, 4)),
    "channels last": chain,
    "channels last, not in place": lambda: chain(in_place=False),
    "channels last, one sample": lambda: chain(size=1),
}
MODES = ("training", "frozen", "statistics no more tracked")
Loss = Callable[[Tensor, Tensor], Tensor]


def assert_as_alone(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss_function: Loss = F.cross_entropy
) -> None:
    """Check losses, gradients and buffers of two passes, the last of them back, against each
    client's model alone.
    """
    model, inputs = model.double(), inputs.double()
    states = [random_state(model, seed) for seed in range(CLIENTS)]
    stack = Stack(model, states)
    for _ in range(2):
        losses = stack.losses(slice(0, CLIENTS), (inputs, targets), loss_function)
    losses.sum().backward()
    for client, values in enumerate(states):
        alone = copy.deepcopy(model)
        alone.load_state_dict(values)
        for _ in range(2):
            loss = loss_function(alone(inputs[client]), targets[client])
        loss.backward()
        torch.testing.assert_close(losses[client], loss, rtol=1e-12, atol=0)
        for (name, stacked), parameter in zip(
            stack.named_parameters(), alone.parameters(), strict=True
        ):
            assert stacked.grad is not None, name
            torch.testing.assert_close(stacked.grad[client], parameter.grad, rtol=1e-10, atol=1e-14)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(
                dict(stack.named_buffers())[name][client], buffer, rtol=1e-12, atol=0
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_that_of_each_alone(case: str, mode: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    for layer in model.train().modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train(mode != "frozen")
            layer.track_running_stats &= mode != "statistics no more tracked"
    assert_as_alone(model, inputs, LABELS[:, : inputs.shape[1]])


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


PIXELS = torch.arange(CLIENTS * SIZE * SIDE * SIDE).reshape(CLIENTS, SIZE, SIDE, SIDE) % CLASSES
LOSSES: dict[str, tuple[Tensor, Loss]] = {
    "some left out": (
        LABELS.where(torch.arange(SIZE) != torch.tensor([[1], [9], [4]]), -100),
        F.cross_entropy,
    ),
    "probabilities": (torch.rand(CLIENTS, SIZE, CLASSES).softmax(-1).double(), F.cross_entropy),
    "pixels": (PIXELS, F.cross_entropy),
    "another loss": (LABELS, smoothed),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_is_that_of_each_alone(case: str) -> None:
    model, inputs = chain()
    if case == "pixels":
        model = nn.Sequential(*model[:6])
    assert_as_alone(model, inputs, *LOSSES[case])


def losses_of(model: nn.Module, inputs: Tensor, **options: Any) -> Tensor:
    """Return the losses of clients that begin alike."""
    stack = Stack(model.train(), [model.state_dict()] * CLIENTS)
    return stack.losses(slice(0, CLIENTS), (inputs, LABELS), F.cross_entropy, **options)


def channels_normalized(model: nn.Module, inputs: Tensor) -> list[int]:
    """Of every call of torch's function."""
    found, plain = list[int](), F.batch_norm

    def counting(values: Tensor, *arguments: Any) -> Tensor:
        found.append(values.shape[1])
        return plain(values, *arguments)

    with patch.object(F, "batch_norm", counting):
        losses_of(model, inputs)
    return found


class Own(nn.BatchNorm2d):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


def test_all_clients_are_in_one_call_but_for_layers_and_stand_ins_of_others() -> None:
    assert channels_normalized(*CASES["2d"]()) == [4 * CLIENTS]
    assert channels_normalized(*around(Own(4), 4, 4)) == [4]
    model, inputs = CASES["2d"]()
    layer = model.get_submodule("1")
    layer.forward = mine = layer.forward
    assert channels_normalized(model, inputs) == [4]
    assert layer.__dict__["forward"] is mine


def test_a_torch_without_what_is_needed_does_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.stacked_layers._functorch", None)
    assert channels_normalized(*CASES["2d"]()) == [4]
    model, inputs = chain(in_place=False)
    assert StackedLayers(model).images(inputs) is inputs
    losses_of(model, inputs).sum().backward()


def test_after_a_pass_and_an_error_the_model_is_as_before() -> None:
    model, inputs = chain()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    losses_of(model, inputs)
    with pytest.raises(RuntimeError):
        losses_of(model, inputs[..., :1, :1, :1])
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is before[name] for name in before)
    assert not any("forward" in layer.__dict__ or layer._forward_hooks for layer in model.modules())


# ---- the order of images -------------------------------------------------------------------------


def test_layers_that_do_not_learn_come_first() -> None:
    model, inputs = chain()
    model[:2].requires_grad_(False)
    stack = Stack(model, [model.state_dict()] * CLIENTS)
    stack.losses(slice(0, CLIENTS), (inputs, LABELS), F.cross_entropy).sum().backward()
    unchanged = [name for name, value in stack.named_parameters() if value.grad is None]
    assert unchanged == ["0.weight", "0.bias", "1.weight", "1.bias"]


class View(nn.Module):
    """A forward of its own, which may need the usual order."""

    def forward(self, images: Tensor) -> Tensor:
        return images.view(len(images), -1)


def test_only_images_of_a_chain_of_torchs_own_layers_change_their_order() -> None:
    model, images = chain()
    for layer in (nn.GroupNorm(2, 4), nn.Dropout2d(), View()):
        assert StackedLayers(nn.Sequential(nn.Conv2d(2, 4, 1), layer)).images(images) is images
    assert StackedLayers(nn.Sequential(nn.Flatten(), nn.Linear(72, 4))).images(images) is images
    layers = StackedLayers(model)
    assert layers.images(images).stride() == (
        2,
        2 * CLIENTS * SIDE * SIDE,
        1,
        2 * CLIENTS * SIDE,
        2 * CLIENTS,
    )
    assert torch.equal(layers.images(images), images)
    volumes = torch.randn(CLIENTS, SIZE, 2, 3, 3, 3)
    assert layers.images(volumes) is volumes
    for name in ("small-cnn", "fedbs-mnist-cnn"):
        digits = torch.randn(CLIENTS, SIZE, 1, 28, 28)
        assert StackedLayers(models.build(name, 10, 1, 28)).images(digits) is not digits


def test_adaptive_pools_of_such_images_loop_over_no_clients() -> None:
    """Else torch warns of it, which fails any test.

    Outside of a stack, torch's own pool stays as it is.
    """
    images = torch.randn(CLIENTS, SIZE, 2, SIDE, SIDE)
    for size in (1, (1, 1), (2, 3), (1, None)):
        pool = nn.AdaptiveAvgPool2d(size)
        layers = StackedLayers(nn.Sequential(nn.Conv2d(2, 2, 1), pool))
        with layers.used():
            pooled = vmap(pool)(layers.images(images))
        torch.testing.assert_close(pooled, torch.stack([pool(each) for each in images]))
    with pytest.warns(UserWarning, match="performance drop"):
        vmap(lambda each: F.adaptive_avg_pool2d(each, 1))(layers.images(images))


@pytest.mark.parametrize("same", [True, False])
def test_states_of_other_dtypes_and_without_an_entry_are_loaded(same: bool) -> None:
    """Flower's averages have counters in float64; an entry that nobody sends is the model's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("empty", torch.zeros(0))
    given = [
        {name: value.double() for name, value in random_state(model, seed).items()}
        for seed in range(CLIENTS)
    ]
    for state in given:
        state["1.num_batches_tracked"] = torch.tensor(7.0, dtype=torch.float64)
        state["1.running_var"] = state["1.running_var"].float()
        del state["0.bias"]
    states = [given[0]] * CLIENTS if same else given
    stacked = Stack(model, states).state_dict()
    for name, value in model.state_dict().items():
        wanted = [state.get(name, value).to(value.dtype) for state in states]
        assert stacked[name].dtype == value.dtype
        assert torch.equal(stacked[name], torch.stack(wanted)), name
