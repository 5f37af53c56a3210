"""What is BN in a model is told by type, under full dotted paths."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2, resnet18, vgg11_bn

from fedbn_flwr.norm import affine_keys, bn_keys, bn_layers, counter_keys, local_keys, statistics_keys


@pytest.mark.parametrize(
    ("make", "layers", "one"),
    [
        (resnet18, 20, "layer2.0.downsample.1"),
        (mobilenet_v2, 52, "features.1.conv.0.1"),
        (vgg11_bn, 8, "features.1"),
    ],
)
def test_torchvision(make: Callable[[], nn.Module], layers: int, one: str) -> None:
    with torch.device("meta"):  # names and types need no numbers
        model = make()
    found = bn_layers(model)
    assert len(found) == layers
    assert found[one] is model.get_submodule(one)
    assert all(isinstance(layer, nn.BatchNorm2d) for layer in found.values())
    assert len(statistics_keys(model)) == len(affine_keys(model)) == 2 * layers
    assert len(counter_keys(model)) == layers


def test_the_keys_of_resnet18_are_those_of_its_state_dict() -> None:
    with torch.device("meta"):
        model = resnet18()
    state = model.state_dict()
    by_size = sum(state[key].numel() for key in bn_keys(model) if key not in counter_keys(model))
    assert by_size == 4 * 4_800  # gamma, beta, mean, variance of 4,800 channels
    assert set(statistics_keys(model) + affine_keys(model) + counter_keys(model)) == set(bn_keys(model))
    assert set(bn_keys(model)) < set(state)


def test_every_kind_of_bn_and_nothing_else() -> None:
    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2), nn.Linear(2, 2)]
    model = nn.Sequential(*kinds, *others)
    assert list(bn_layers(model)) == ["0", "1", "2", "3"]
    assert local_keys(model) == []


def test_bn_without_affine_or_without_statistics() -> None:
    model = nn.ModuleDict(
        {
            "no_affine": nn.BatchNorm1d(2, affine=False),
            "no_statistics": nn.BatchNorm1d(2, track_running_stats=False),
        }
    )
    assert statistics_keys(model) == ["no_affine.running_mean", "no_affine.running_var"]
    assert affine_keys(model) == ["no_statistics.weight", "no_statistics.bias"]
    assert counter_keys(model) == ["no_affine.num_batches_tracked"]


def test_a_root_that_is_bn() -> None:
    layer = nn.BatchNorm2d(3)
    assert bn_layers(layer) == {"": layer}
    assert bn_keys(layer) == list(layer.state_dict())
    assert statistics_keys(layer) == ["running_mean", "running_var"]


def test_a_shared_layer_is_listed_once_but_has_all_its_keys() -> None:
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    assert bn_layers(model) == {"0": shared}
    assert bn_keys(model) == list(model.state_dict())
    assert statistics_keys(model)[-1] == "1.1.running_var"


def test_layers_after_a_shared_one_are_found() -> None:
    shared, last = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert bn_layers(nn.Sequential(shared, shared, last)) == {"0": shared, "2": last}
