"""Networks without normalizers: what `wsconv` and `gn-ws` make of a model, and that it trains."""

import logging
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from torch import Tensor, nn
from torchvision.models import densenet121, mobilenet_v2, mobilenet_v3_small, resnet18, resnet50

from fedbn_flwr.models import build
from fedbn_flwr.norm import bn_layers, freeze, replace
from fedbn_flwr.norm.convolutions import ScaledStdConv2d
from fedbn_flwr.norm.layers import GroupNorm
from fedbn_flwr.norm.trace import wiring
from fedbn_flwr.norm.wsconv import activation_gain

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))


def gains(model: nn.Module) -> dict[str, float]:
    return {
        name: float(layer.gain.flatten()[0])
        for name, layer in model.named_modules()
        if hasattr(layer, "gain")
    }


def gammas(model: nn.Module) -> dict[str, float]:
    convolutions: dict[str, Any] = dict(model.named_modules())
    return {
        name: layer.scale * layer.weight[0].numel() ** 0.5
        for name, layer in convolutions.items()
        if hasattr(layer, "scale")
    }


@pytest.mark.parametrize(("make", "count"), [(resnet18, 20), (mobilenet_v2, 52)])
def test_every_convolution_is_replaced_and_every_normalizer_gone(make: Any, count: int) -> None:
    model = replace(make(weights=None), "wsconv")
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == count
    assert all(type(layer) is ScaledStdConv2d and layer.bias is not None for layer in convolutions)
    assert not bn_layers(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not [key for key in model.state_dict() if key.endswith("gain")]
    pickle.loads(pickle.dumps(model))(torch.zeros(2, 3, 64, 64))


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (None, lambda z: z),
        (F.relu, lambda z: max(z, 0)),
        (nn.ReLU(inplace=True), lambda z: max(z, 0)),
        (nn.ReLU6(inplace=True), lambda z: min(max(z, 0), 6)),
        (nn.LeakyReLU(0.2), lambda z: max(z, 0.2 * z)),
        (nn.ELU(), lambda z: z if z > 0 else math.expm1(z)),
        (nn.SiLU(), lambda z: z * sigmoid(z)),
        (nn.GELU(), lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2),
        (F.mish, lambda z: z * math.tanh(math.log1p(math.exp(z)))),
        (F.hardswish, lambda z: z * min(max(z + 3, 0), 6) / 6),
        (torch.tanh, math.tanh),
        (torch.sigmoid, sigmoid),
    ],
)
def test_the_gain_makes_up_for_what_activations_take_from_the_variance(
    activation: Any, formula: Any
) -> None:
    def expectation(power: int) -> float:
        def integrand(z: float) -> float:
            return float(formula(z)) ** power * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

        return float(
            sum(
                quad(integrand, *ends, epsabs=1e-14)[0] for ends in pairwise((-12, -3, 0, 3, 6, 12))
            )
        )

    reference = (expectation(2) - expectation(1) ** 2) ** -0.5
    assert activation_gain(activation) == pytest.approx(reference, abs=1e-10)


@pytest.mark.parametrize(
    ("make", "count", "one"),
    [
        (resnet18, 8, "layer2.0.conv2"),
        (resnet50, 16, "layer3.2.conv3"),
        (mobilenet_v2, 10, "features.3.conv.2"),
        # squeeze and excitation, computed from its own features
        (
            mobilenet_v3_small,
            6,
            "features.5.block.3.0",
        ),
        (densenet121, 0, None),
    ],
)
def test_the_ends_of_residual_branches(make: Any, count: int, one: str | None) -> None:
    ends = wiring(replace(make(weights=None), "none")).branch_ends
    assert len(ends) == count
    assert one is None or one in ends


class Gated(nn.Module):
    """Features times a gate, which is computed first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(inputs))
        return self.last(gate.mul(F.silu(inputs)))  # type: ignore[no-any-return]


class Joined(nn.Module):
    """Channels of two paths side by side: the one with more convolutions is the main path, though
    it comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        deep = torch.tanh(self.first(inputs))
        return self.last(torch.cat([deep, F.silu(inputs)], 1))  # type: ignore[no-any-return]


class Sums(nn.Module):
    """A constant, two branches of one depth, a branch, and what was added already, added."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.branch, self.last = (nn.Conv2d(2, 2, 1) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = F.silu(inputs + 1.0)
        both = F.silu(self.left(inputs)) + F.silu(self.right(inputs))
        added = both + F.silu(self.branch(both))
        return self.last(added + inputs)  # type: ignore[no-any-return]


def test_the_path_that_feeds_a_convolution() -> None:
    assert wiring(Gated()).activations["last"] is F.silu
    assert wiring(Joined()).activations["last"] is torch.tanh


def test_additions_end_paths() -> None:
    wired = wiring(Sums())
    assert wired.branch_ends == {"branch"}
    assert wired.activations == {"left": F.silu, "right": F.silu}


def test_branches_are_scaled_such_that_the_variance_stays_bounded() -> None:
    model = build("resnet20", norm="wsconv")
    scaled = {name: gain for name, gain in gains(model).items() if gain != 1}
    assert list(scaled) == [
        f"layer{stage}.{block}.conv2" for stage in (1, 2, 3) for block in (0, 1, 2)
    ]
    assert list(scaled.values()) == pytest.approx([math.sqrt(2 / 9)] * 9)
    for text_of_the_paper in ("paper", 1.0):
        assert set(
            gains(build("resnet20", norm="wsconv", branch_scale=text_of_the_paper)).values()
        ) == {1.0}


def test_gamma_is_that_of_the_activation_before_the_convolution() -> None:
    found = gammas(replace(mobilenet_v2(weights=None), "wsconv"))
    assert found["features.0.0"] == pytest.approx(RELU_GAIN)  # the images
    assert found["features.2.conv.0.0"] == pytest.approx(1)  # a linear bottleneck
    assert found["features.2.conv.1.0"] == pytest.approx(1.7131, abs=5e-4)  # ReLU6
    residual = gammas(build("resnet20", norm="wsconv"))
    assert list(residual.values()) == pytest.approx([RELU_GAIN] * 19)
    assert list(gammas(build("resnet20", norm="wsconv", gamma=1.5)).values()) == pytest.approx(
        [1.5] * 19
    )


def test_a_model_that_cannot_be_traced_is_left_unscaled_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Twisted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, images: Tensor) -> Tensor:
            output: Tensor = self.conv(images)
            return output + images if images.sum() > 0 else output

    with caplog.at_level(logging.WARNING):
        model = replace(Twisted(), "wsconv")
    assert "Twisted cannot be traced" in caplog.text
    assert gains(model) == {"conv": 1.0}
    assert gammas(model)["conv"] == pytest.approx(RELU_GAIN)


@pytest.mark.parametrize("kind", ["gn", "bn"])
def test_standardized_weights_beside_a_normalizer(kind: str) -> None:
    model, plain = (build("resnet20", norm=norm, groups=4) for norm in (f"{kind}-ws", kind))
    assert sum(type(layer) is ScaledStdConv2d for layer in model.modules()) == 19
    assert list(bn_layers(model)) == list(bn_layers(plain))
    groups = [layer.num_groups for layer in model.modules() if isinstance(layer, GroupNorm)]
    assert groups == ([4] * 19 if kind == "gn" else [])
    assert list(model.state_dict()) == list(plain.state_dict())


def test_frozen_statistics_fit_standardized_weights_however_large_they_grow() -> None:
    model = build("resnet20", norm="bn-ws").double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    with freeze(model), torch.no_grad():
        before = model(images)
        for layer in model.modules():
            if type(layer) is ScaledStdConv2d:
                layer.weight.mul_(7)
        # of the largest output: one that is nearly 0 is a difference of large numbers
        assert float((model(images) - before).abs().max()) < 1e-8 * float(before.abs().max())
