"""Which of the networks that a process calls is the one that trains, and what it began with."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from fedbn_flwr.doctor.observer import (
    Network,
    NetworkObserver,
    describe_network,
    main_network,
    match,
    same_numbers,
    state_of,
)
from tests.helpers.other_shapes import OwnNorm

IMAGES = torch.arange(128.0).view(2, 1, 8, 8)


class Measured(nn.Module):
    """Calls its layers one by one when it is made, as a detector that measures its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(4, 2, 1)
        self.eval()
        self.head(self.backbone(IMAGES))
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.head(self.backbone(images))
        return features


class Wrapper(nn.Module):
    """Has the state of the network in it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Any:
        return self.module(images)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)


def begins_as(network: Network | None, received: dict[str, Any]) -> bool:
    """Return whether a network is the whole one, and began with these numbers."""
    assert network is not None
    assert list(network.layers) == ["backbone.1"]
    return network.start.keys() == received.keys() and all(
        same_numbers(value, network.start[name]) for name, value in received.items()
    )


@pytest.fixture
def given() -> Measured:
    """Return the network whose state was received."""
    return Measured()


def test_networks_that_were_made_and_not_used_are_none(given: Measured) -> None:
    received = state_of(given)
    with NetworkObserver() as observer:
        Measured()
        net = Measured()
        with torch.no_grad():
            net(IMAGES)  # before anything is loaded
        net.load_state_dict(given.state_dict())
        net(IMAGES)
        networks = observer.take()
    assert begins_as(main_network(networks, received), received)


def test_a_layer_without_parameters_trains_no_part_that_was_called_before(given: Measured) -> None:
    received = state_of(given)
    with NetworkObserver() as observer:
        given.backbone.eval()(IMAGES)
        nn.BatchNorm2d(1, affine=False)(IMAGES)
        given.train()(IMAGES)
        networks = observer.take()
    assert begins_as(main_network(networks, received), received)


def test_a_frozen_backbone_that_is_called_by_itself_is_a_part(given: Measured) -> None:
    received = state_of(given)
    head = nn.Sequential(given.head, nn.BatchNorm2d(2))
    with NetworkObserver() as observer:
        head(given.backbone.eval()(IMAGES))
        networks = observer.take()
    network = main_network(networks, received)
    assert network is not None
    assert list(network.layers) == ["network 1.1", "network 2.1"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_wrapper_is_looked_through(given: Measured, times: int) -> None:
    received = state_of(given)
    wrapper: nn.Module = given
    for _ in range(times):
        wrapper = Wrapper(wrapper)
    another = Measured()
    with NetworkObserver() as observer:
        wrapper(IMAGES)
        another(IMAGES)
        first, second = observer.take()
    assert begins_as(first, received)
    assert second.learned


def test_a_layer_of_an_unknown_class_with_running_statistics_is_no_other_normalizer() -> None:
    """Without it, a network of such layers alone would have no BN, which is fine."""
    made = describe_network(nn.Sequential(nn.Conv2d(1, 4, 3), OwnNorm(4), nn.GroupNorm(2, 4)))
    assert (made.foreign, made.layers, made.others) == (("1",), {}, {"GroupNorm": 1})
    for known in (
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        FrozenBatchNorm2d(4),
    ):
        assert describe_network(nn.Sequential(known)).foreign == ()
    tracking = describe_network(nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True)))
    assert tracking.others == {"InstanceNorm1d with running statistics": 1}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_network_can_be_traced() -> None:
    pairs = [layer for _ in range(2) for layer in (nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1))]
    with NetworkObserver():  # torch traces twice, and compares
        torch.jit.trace(nn.Sequential(*pairs), IMAGES)


@pytest.mark.parametrize(
    ("layer", "attack", "count"),
    [
        (nn.BatchNorm2d(2), False, 1),
        (nn.BatchNorm2d(2), True, 0),
        (nn.BatchNorm2d(2, affine=False), False, 1),
        (nn.BatchNorm2d(2).requires_grad_(False), False, 1),
    ],
)
def test_training_in_evaluation_mode_is_told_from_an_attack_on_the_inputs(
    layer: nn.Module, attack: bool, count: int
) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), layer).eval()
    images = IMAGES.clone().requires_grad_()
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    with NetworkObserver() as observer:
        loss = net(images).square().mean()
        torch.autograd.grad(loss, images if attack else learning)
        (network,) = observer.take()
    assert network.layers["1"].trained_fixed == count


def arrays_of(*names: str) -> dict[str, Any]:
    return {name: np.zeros(2) for name in names}


def test_one_prefix_stands_before_all_names_on_either_side() -> None:
    plain = arrays_of("bn1.weight", "layer1.bn1.weight")
    wrapped = arrays_of("module.layer1.bn1.weight", "module.bn1.weight")
    assert match(plain, wrapped) == {name: name.removeprefix("module.") for name in wrapped}
    assert match(wrapped, plain) == {name: f"module.{name}" for name in plain}


def test_a_second_set_of_arrays_is_none_of_the_state() -> None:
    state = arrays_of("conv.weight", "bn1.weight", "bn1.running_mean")
    controls = arrays_of("controls.conv.weight", "controls.bn1.weight")
    itself = {name: name for name in state}
    assert match({**state, **controls}, state) == itself
    assert match({**controls, **state}, state) == itself
    kept_by_name = arrays_of("conv.weight", "out.weight")
    every = [*state, "out.weight", "layer1.bn1.weight"]
    controls = arrays_of(*(f"controls.{name}" for name in every))
    found = match({**kept_by_name, **controls}, arrays_of(*every))
    assert found == {name: name for name in kept_by_name}


def test_networks_that_have_the_same_names_are_told_apart() -> None:
    sent = arrays_of("net.1.weight", "net.3.weight", "critic.net.3.weight", "net.3.running_mean")
    sent["net.3.weight"] = np.zeros(5)
    state = {
        "network 1.net.1.weight": sent["net.1.weight"],
        "network 1.net.3.weight": sent["net.3.weight"],
        "network 2.net.3.weight": sent["critic.net.3.weight"],
        "network 2.net.3.running_mean": sent["net.3.running_mean"],
    }
    assert match(sent, state) == dict(zip(state, sent, strict=True))
