"""What is BN in a model is told by type, under full dotted paths."""

from torch import nn

from fedbn_flwr.norm import bn_keys, bn_layers, local_keys, statistics_keys


def test_every_kind_of_bn_and_nothing_else() -> None:
    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2), nn.Linear(2, 2)]
    model = nn.Sequential(*kinds, *others)
    assert list(bn_layers(model)) == ["0", "1", "2", "3"]
    assert local_keys(model) == []


def test_a_root_that_is_bn() -> None:
    layer = nn.BatchNorm2d(3)
    assert bn_layers(layer) == {"": layer}
    assert bn_keys(layer) == list(layer.state_dict())
    assert statistics_keys(layer) == ["running_mean", "running_var"]


def test_a_shared_layer_is_listed_once_but_has_all_its_keys() -> None:
    shared, last = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), last)
    assert bn_layers(model) == {"0": shared, "2": last}
    assert bn_keys(model) == list(model.state_dict())
    assert statistics_keys(model)[2:4] == ["1.1.running_mean", "1.1.running_var"]
