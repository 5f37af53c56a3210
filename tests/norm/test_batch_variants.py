"""Variants of BN: batch renormalization, hybrid BN, static BN."""

import copy
from math import exp
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.norm import (
    BatchNorm,
    affine_keys,
    bn_keys,
    bn_layers,
    freeze,
    local_keys,
    replace,
    statistics_keys,
)
from fedbn_flwr.norm.layers import BatchRenorm, HybridBatchNorm, StaticBatchNorm

Layer = TypeVar("Layer", bound=BatchNorm)

SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 2)]


@pytest.mark.parametrize(
    "layer", [BatchRenorm(3, eps=0.7, r_max=1.0, d_max=0.0), StaticBatchNorm(3, eps=0.7)]
)
def test_eps_is_that_of_the_layer(layer: BatchNorm) -> None:
    inputs = random_inputs((4, 3, 5))
    torch.testing.assert_close(layer.double()(inputs), nn.BatchNorm1d(3, eps=0.7).double()(inputs))


def test_batch_renorm_without_momentum_averages_over_all_batches_as_bn_does() -> None:
    layer, plain = BatchRenorm(3, momentum=None).double(), nn.BatchNorm1d(3, momentum=None).double()
    for scale in (1.0, 3.0, 5.0):
        layer(scale * random_inputs((4, 3, 5)))
        plain(scale * random_inputs((4, 3, 5)))
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


def random_inputs(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    inputs = 2 * torch.randn(shape, generator=generator, dtype=torch.float64) + 1
    return inputs.requires_grad_()


def with_statistics(layer: Layer) -> Layer:
    """Put running statistics and affine parameters into a layer of three channels that are not the
    first ones.
    """
    layer.double()
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
    layer.running_var.copy_(torch.tensor([0.5, 4.0, 1.5]))
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(1))
        nn.init.uniform_(layer.bias, generator=torch.Generator().manual_seed(2))
    return layer


def columns(inputs: Tensor) -> Tensor:
    """All values of each channel."""
    return inputs.transpose(0, 1).reshape(inputs.shape[1], -1)


def uncolumns(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(like.shape[1], like.shape[0], *like.shape[2:]).transpose(0, 1)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_renorm_against_its_formula(shape: tuple[int, ...], affine: bool) -> None:
    layer = with_statistics(BatchRenorm(3, affine=affine, r_max=1.5, d_max=0.4))
    reference = nn.BatchNorm1d(3, affine=affine).double()
    reference.load_state_dict(layer.state_dict())
    assert layer.running_mean is not None
    assert layer.running_var is not None
    inputs = random_inputs(shape)
    rows = columns(inputs)
    mean, sigma = rows.mean(dim=1), (rows.var(dim=1, correction=0) + layer.eps).sqrt()
    running_sigma = (layer.running_var + layer.eps).sqrt().clone()
    r = (sigma / running_sigma).clamp(1 / 1.5, 1.5).detach()
    d = ((mean - layer.running_mean) / running_sigma).clamp(-0.4, 0.4).detach()
    expected = ((rows - mean[:, None]) / sigma[:, None]) * r[:, None] + d[:, None]
    if affine:
        expected = expected * layer.weight[:, None] + layer.bias[:, None]
    upstream = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [inputs, *layer.parameters()]
    expected_gradients = torch.autograd.grad((uncolumns(expected, inputs) * upstream).sum(), leaves)
    outputs = layer(inputs)
    torch.testing.assert_close(outputs, uncolumns(expected, inputs))
    torch.testing.assert_close(
        torch.autograd.grad((outputs * upstream).sum(), leaves), expected_gradients
    )
    reference(columns(inputs).T)
    torch.testing.assert_close(layer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("mix", [0.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_bn_against_its_formula(shape: tuple[int, ...], affine: bool, mix: float) -> None:
    """It starts half way; with the batch's statistics alone it is BN in training, without them BN
    that is frozen.
    """
    layer = with_statistics(HybridBatchNorm(3, affine=affine))
    assert not layer.mix.any()
    layer.mix.data.fill_(mix)
    layer.load_state_dict(
        {"steady_mean": layer.running_mean, "steady_var": layer.running_var}, strict=False
    )
    inputs = random_inputs(shape)
    rows = columns(inputs)
    share = 1 / (1 + exp(-mix))
    mean = (1 - share) * layer.steady_mean + share * rows.mean(dim=1)
    variance = (1 - share) * layer.steady_var + share * rows.var(dim=1, correction=0)
    expected = (rows - mean[:, None]) / (variance[:, None] + layer.eps).sqrt()
    if affine:
        expected = expected * layer.weight[:, None] + layer.bias[:, None]
    upstream = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    outputs, expected = layer(inputs), uncolumns(expected, inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    leaves = [inputs, *(value for name, value in layer.named_parameters() if name != "mix")]
    torch.testing.assert_close(
        torch.autograd.grad((outputs * upstream).sum(), leaves, retain_graph=True),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        rtol=1e-10,
        atol=1e-10,
    )
    if mix == 0:
        (slope,) = torch.autograd.grad((outputs * upstream).sum(), [layer.mix])
        assert slope.abs().min() > 0


def test_hybrid_bn_never_changes_its_statistics_and_keeps_its_mix_local() -> None:
    model = nn.Sequential(nn.Linear(2, 3), HybridBatchNorm(3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(torch.randn(4, 2))
    torch.testing.assert_close(model.state_dict(), before)
    assert local_keys(model) == ["1.mix"]
    assert "1.mix" in bn_keys(model)
    assert "1.mix" not in affine_keys(model) + statistics_keys(model)


def test_static_bn_keeps_no_statistics_while_it_trains_and_evaluates_with_what_was_installed() -> (
    None
):
    layer, plain = with_statistics(StaticBatchNorm(3)), with_statistics(BatchNorm(3))
    before, inputs = copy.deepcopy(layer.state_dict()), random_inputs((4, 3, 5))
    torch.testing.assert_close(layer.eval()(inputs), plain.eval()(inputs))
    torch.testing.assert_close(layer.train()(inputs), plain.train()(inputs))
    torch.testing.assert_close(layer.state_dict(), before)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("brn", BatchRenorm), ("hbn", HybridBatchNorm), ("static-bn", StaticBatchNorm)],
)
def test_they_count_as_bn_and_can_be_put_in_frozen_and_taken_out(
    kind: str, layer: type[BatchNorm]
) -> None:
    model = replace(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.2)), kind
    )
    (found,) = bn_layers(model).values()
    assert type(found) is layer
    assert (found.eps, found.momentum) == (1e-3, 0.2)
    inputs = torch.randn(2, 3, 4, 4)
    with freeze(model):
        torch.testing.assert_close(model.train()(inputs), model.eval()(inputs))
    assert type(replace(model, "bn").get_submodule("1")) is BatchNorm


@pytest.mark.parametrize("kind", ["brn", "hbn", "static-bn"])
def test_inputs_of_half_precision_keep_their_type_and_those_without_channels_are_refused(
    kind: str,
) -> None:
    layer = replace(nn.BatchNorm2d(4), kind)
    assert layer(torch.randn(2, 4, 3, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected an input of shape"):
        layer(torch.ones(4))
