"""Freezing BN, and undoing it."""

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from fedbn_flwr.norm import bn_layers, freeze
from tests.helpers.toys import assert_same_state


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(4))
    )


def snapshot(model: nn.Module) -> dict[str, object]:
    modes = {f"mode of {name}": layer.training for name, layer in model.named_modules()}
    return modes | {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def assert_frozen(model: nn.Module) -> None:
    model.train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(8, 3))
    assert_same_state(dict(model.named_buffers()), before)


class WithDropout(nn.BatchNorm1d):
    """BN with a layer of another kind inside, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout()


def test_what_is_inside_a_frozen_layer_has_the_mode_that_is_asked_for() -> None:
    layer = WithDropout(2)
    with freeze(layer):
        for mode in (False, True):
            layer.train(mode)
            assert (layer.training, layer.drop.training) == (False, mode)


def test_frozen_layers_use_the_running_statistics_and_still_learn() -> None:
    layer = nn.BatchNorm1d(2, eps=0.0)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(torch.tensor([1.0, -2.0]))
    layer.running_var.copy_(torch.tensor([4.0, 9.0]))
    with freeze(layer):
        # one sample, which BN in training refuses
        output = layer.train()(torch.tensor([[3.0, 4.0]]))
    assert output.tolist() == [[1.0, 2.0]]
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
def test_what_is_frozen_is_what_was_asked_for(statistics: bool, affine: bool) -> None:
    model = make_model()
    with freeze(model, statistics=statistics, affine=affine):
        for layer in bn_layers(model.train()).values():
            assert layer.training is not statistics
            assert layer.weight.requires_grad is layer.bias.requires_grad is not affine
        assert model[0].weight.requires_grad
        assert model[2].training  # dropout is none of our business
    assert all(snapshot(model).values())


def test_the_end_restores_modes_and_gradients_also_after_an_error() -> None:
    model = make_model()
    model[1].eval()
    model[1].weight.requires_grad_(False)
    before = snapshot(model)
    with suppress(KeyError), freeze(model, affine=True):
        model.eval().train()
        model[1].eval()
        raise KeyError
    assert snapshot(model) == before
    assert "train" not in vars(model[1])


def test_the_end_leaves_the_mode_that_was_asked_for_meanwhile() -> None:
    model = make_model()
    with freeze(model), freeze(model):
        model.eval()
    assert not any(layer.training for layer in model.modules())
    assert model.train()[1].training


def test_freezes_nest() -> None:
    model = make_model()
    model[3].eval()
    before = snapshot(model)
    with freeze(model):
        with freeze(model, affine=True):
            assert not model[1].weight.requires_grad
        assert model[1].weight.requires_grad
        assert_frozen(model)
        model[3].eval()
    assert snapshot(model) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_frozen_model_is_frozen_by_itself(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = make_model()
    with freeze(model):
        other = copied(model)
    assert model.train()[1].training
    assert_frozen(other)


def test_layers_without_running_statistics_are_named() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    )
    with (
        pytest.raises(ValueError, match=r"BN layer '1\.0' has no running statistics"),
        freeze(model),
    ):
        pass
    assert model[0].training
    with freeze(model, statistics=False, affine=True):  # its affine parameters can be
        assert not model[1].get_submodule("0").weight.requires_grad


def test_layers_without_affine_parameters() -> None:
    layer = nn.BatchNorm1d(2, affine=False)
    with freeze(layer, affine=True):
        assert not layer.train().training
    assert layer.training
