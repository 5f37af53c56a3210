"""Freezing BN, and undoing it."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.norm import bn_layers, freeze


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(4)))


def snapshot(model: nn.Module) -> dict[str, object]:
    modes = {f"mode of {name}": layer.training for name, layer in model.named_modules()}
    return modes | {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def assert_frozen(model: nn.Module) -> None:
    model.train()
    before = statistics(model)
    model(torch.randn(8, 3))
    assert same(statistics(model), before)


def test_frozen_statistics_stay_whatever_the_mode() -> None:
    model = make_model()
    freeze(model)
    assert_frozen(model)
    assert model[2].training  # dropout is none of our business
    assert not model[1].training
    assert not model[3].get_submodule("0").training


class WithDropout(nn.BatchNorm1d):
    """BN with a layer of another kind inside, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout()


def test_what_is_inside_a_frozen_layer_has_the_mode_that_is_asked_for() -> None:
    layer = WithDropout(2)
    freeze(layer)
    for mode in (False, True):
        layer.train(mode)
        assert (layer.training, layer.drop.training) == (False, mode)


def test_frozen_layers_use_the_running_statistics_and_still_learn() -> None:
    layer = nn.BatchNorm1d(2, eps=0.0)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(torch.tensor([1.0, -2.0]))
    layer.running_var.copy_(torch.tensor([4.0, 9.0]))
    freeze(layer)
    output = layer.train()(torch.tensor([[3.0, 4.0]]))  # one sample, which BN in training refuses
    assert output.tolist() == [[1.0, 2.0]]
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [1.0, 2.0]


def test_undo_restores_modes_and_gradients() -> None:
    model = make_model()
    model[1].eval()
    model[1].weight.requires_grad_(False)
    before = snapshot(model)
    frozen = freeze(model, affine=True)
    model.eval().train()
    model[1].eval()
    frozen.undo()
    assert snapshot(model) == before
    assert "train" not in vars(model[1])
    frozen.undo()  # a second time changes nothing
    assert snapshot(model) == before


def test_undo_leaves_the_mode_that_was_asked_for_meanwhile() -> None:
    model = make_model()
    frozen = freeze(model)
    model.eval()
    frozen.undo()
    assert not any(layer.training for layer in model.modules())
    assert model.train()[1].training


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
def test_what_is_frozen_is_what_was_asked_for(statistics: bool, affine: bool) -> None:
    model = make_model()
    with freeze(model, statistics=statistics, affine=affine):
        for layer in bn_layers(model.train()).values():
            assert layer.training is not statistics
            assert layer.weight.requires_grad is layer.bias.requires_grad is not affine
        assert model[0].weight.requires_grad
    assert all(snapshot(model).values())


def test_the_context_manager_undoes_on_an_error() -> None:
    model = make_model()
    with pytest.raises(KeyError), freeze(model):
        raise KeyError
    assert all(snapshot(model).values())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freezes_nest_in_any_order(order: tuple[int, ...]) -> None:
    model = make_model()
    model[3].eval()
    before = snapshot(model)
    freezes = [freeze(model), freeze(model, affine=True), freeze(model, statistics=False, affine=True)]
    for index in order[:2]:
        freezes[index].undo()
    remaining = order[2]
    assert model[1].training is (remaining == 2)
    assert model[1].weight.requires_grad is (remaining == 0)
    freezes[remaining].undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_frozen_model_is_frozen_by_itself(how: str) -> None:
    model = make_model()
    frozen = freeze(model)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    frozen.undo()
    assert model.train()[1].training
    assert_frozen(copied)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_freeze_that_is_copied_with_its_model_is_undone_in_the_copy(make_copy: Callable[[Any], Any]) -> None:
    model = make_model()
    frozen = freeze(model, affine=True)
    copied, copied_freeze = make_copy((model, frozen))
    copied_freeze.undo()
    assert all(snapshot(copied.train()).values())
    assert_frozen(model)
    assert not model[1].weight.requires_grad
    frozen.undo()
    assert all(snapshot(model).values())


def test_layers_without_running_statistics_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))
    with pytest.raises(ValueError, match=r"BN layer '1\.0' has no running statistics"):
        freeze(model)
    assert model[0].training
    freeze(model, statistics=False, affine=True)  # its affine parameters can be
    assert not model[1].get_submodule("0").weight.requires_grad


def test_layers_without_affine_parameters() -> None:
    layer = nn.BatchNorm1d(2, affine=False)
    with freeze(layer, affine=True):
        assert not layer.train().training
    assert layer.training
