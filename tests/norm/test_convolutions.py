"""Standardized convolutions against NumPy and against timm."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.std_conv import ScaledStdConv2d as TimmConv2d
from timm.layers.std_conv import StdConv2d
from torch import nn

from fedbn_flwr.norm.convolutions import ScaledStdConv2d, standardized

KINDS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def standardize(weight: NDArray[np.float64], gamma: float, gain: float) -> NDArray[np.float64]:
    """Row by row, as it is printed, with the square that the print lacks."""
    result = np.empty_like(weight)
    for index, row in enumerate(weight):
        mean = row.sum() / row.size
        variance = ((row - mean) ** 2).sum() / row.size
        result[index] = gain * gamma * (row - mean) / np.sqrt(variance) / np.sqrt(row.size)
    return result


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, int]:
    """A convolution of one, two or three dimensions, and how many."""
    dimensions = draw(st.integers(1, 3))
    groups, inputs, outputs = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    size = draw(st.tuples(*[st.integers(1, 3)] * dimensions))
    padding = draw(st.sampled_from([0, 1, "same"]))
    options = {
        "stride": 1 if padding == "same" else draw(st.integers(1, 2)),
        "padding": padding,
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "circular", "replicate", "reflect"])),
    }
    return KINDS[dimensions](
        inputs * groups, outputs * groups, size, **options
    ).double(), dimensions


@settings(max_examples=60, deadline=None)
@given(convolutions(), st.floats(0.5, 2.0), st.floats(0.1, 2.0), st.integers(0, 2**31))
def test_any_convolution_equals_one_with_the_weight_from_numpy(
    drawn: tuple[Any, int], gamma: float, gain: float, seed: int
) -> None:
    layer, dimensions = drawn
    assume(layer.weight[0].numel() > 1)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, layer.in_channels, *[7] * dimensions)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    new: Any = standardized("layer", layer, gamma, gain)
    expected = standardize(new.weight.detach().numpy(), gamma, gain)
    outputs = layer._conv_forward(inputs, torch.from_numpy(expected), layer.bias)
    torch.testing.assert_close(new(inputs), outputs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("channels", [3, 64, 512, pytest.param(2048, marks=pytest.mark.slow)])
def test_the_epsilon_does_not_matter_at_any_fan_in(channels: int) -> None:
    layer: Any = standardized("layer", nn.Conv2d(channels, 2, 3).double(), gamma=1.0)
    inputs = torch.eye(9 * channels, dtype=torch.float64).view(-1, channels, 3, 3)
    found = (layer(inputs) - layer.bias.view(1, -1, 1, 1)).detach()
    wanted = standardize(layer.weight.detach().numpy(), 1.0, 1.0)
    exact = torch.from_numpy(wanted).flatten(1).T.view_as(found)
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-8


@pytest.mark.parametrize(
    "layer", [StdConv2d(3, 4, 3), TimmConv2d(3, 4, (3, 1), dilation=2), ScaledStdConv2d(4, 4, 1)]
)
def test_a_weight_is_standardized_once(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"which standardizes its weight already"):
        standardized("layer", layer, gamma=1.0)


def test_a_constant_row_stays_finite() -> None:
    layer = ScaledStdConv2d(2, 2, 3)
    nn.init.zeros_(layer.weight)
    layer(torch.randn(1, 2, 5, 5)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_in_two_dimensions_the_numbers_are_timms() -> None:
    ours: Any = standardized("", nn.Conv2d(4, 6, 3, groups=2, padding=1, stride=2), gamma=1.7)
    theirs = TimmConv2d(4, 6, 3, groups=2, padding=1, stride=2, gamma=1.7, eps=ours.eps)
    theirs.load_state_dict({**ours.state_dict(), "gain": torch.ones(6, 1, 1, 1)})
    inputs = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(ours(inputs), theirs(inputs))


def test_a_convolution_with_a_forward_of_its_own_goes_on_with_it() -> None:
    layer = Conv2dSame(3, 4, 3, stride=2).double()
    inputs = torch.randn(
        2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    new: Any = standardized("", layer, gamma=None)
    ones = torch.from_numpy(standardize(new.weight.detach().numpy(), 27**0.5, 1.0))
    # as TensorFlow pads where sides are even and the stride is 2: one row and column at the end
    torch.testing.assert_close(
        new(inputs), F.conv2d(F.pad(inputs, (0, 1, 0, 1)), ones, new.bias, stride=2)
    )
    assert new.weight is layer.weight
    assert (type(layer), [name for name, _ in layer.named_buffers()]) == (Conv2dSame, [])


def test_the_start_is_at_unit_norm_and_gives_the_same_function() -> None:
    layer = nn.Conv2d(3, 4, 3).double()
    with torch.no_grad():
        layer.weight[1] *= 100
        layer.weight[2] = 0
    with np.errstate(invalid="ignore"):  # the row of zeros has no deviation
        expected = standardize(layer.weight.detach().numpy(), 1.0, 1.0)
        new: Any = standardized("", layer, 1.0)
        found = standardize(new.weight.detach().numpy(), 1.0, 1.0)
    assert new.weight.flatten(1).std(dim=1, correction=0).mul(27**0.5).tolist() == pytest.approx(
        [1, 1, 0, 1]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_without_gamma_the_rows_have_unit_deviation() -> None:
    new: Any = standardized("", nn.Conv1d(3, 4, 5).double(), gamma=None)
    ones = standardize(new.weight.detach().numpy(), 15**0.5, 1.0)
    assert ones.std(axis=(1, 2)) == pytest.approx(1, abs=1e-4)
    inputs = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(new(inputs), F.conv1d(inputs, torch.from_numpy(ones), new.bias))
    single: Any = standardized("", nn.Conv1d(3, 1, 5), gamma=None)
    assert (single.scale, ScaledStdConv2d(3, 4, 3).scale) == pytest.approx((1.0, 27**-0.5))


def test_a_constant_gain_is_neither_trained_nor_sent() -> None:
    layer = nn.Conv2d(3, 4, 3)
    constant = standardized("", layer, 1.0, first_gain=0.5)
    assert [name for name, _ in constant.named_parameters()] == ["weight", "bias"]
    assert list(constant.state_dict()) == ["weight", "bias"]
    assert constant.get_buffer("gain").unique().tolist() == [0.5]
    learnable = standardized("", layer, 1.0, first_gain=0.5, learnable=True)
    assert learnable.get_parameter("gain").requires_grad
    assert "gain" in learnable.state_dict()


def test_parameters_device_precision_and_mode_are_the_layers_own() -> None:
    layer = nn.Conv2d(3, 4, 3).to(torch.bfloat16).eval()
    new: Any = standardized("", layer, 1.0)
    assert new.weight is layer.weight
    assert new.bias is layer.bias
    assert new.gain.dtype == torch.bfloat16
    assert not new.training


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 1, groups=4),
        nn.Conv1d(1, 4, 1),
        nn.ConvTranspose2d(2, 3, 2),
        nn.Linear(2, 2),
    ],
)
def test_what_stays_as_it_is(layer: nn.Module) -> None:
    assert standardized("", layer, 1.0) is layer
