"""Fixup's start, by hand."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet50

from fedbn_flwr.models import build
from fedbn_flwr.norm import bn_layers, replace
from fedbn_flwr.norm.fixup import ScaleAndShift, Shift


def test_scalars_of_resnet20() -> None:
    model = build("resnet20", norm="fixup")
    shifts = sum(type(layer) is Shift for layer in model.modules())
    # before 19 convolutions, the classifier and the activations of the stem and inside the nine blocks
    assert shifts == 19 + 1 + 1 + 9
    assert sum(type(layer) is ScaleAndShift for layer in model.modules()) == 9
    assert not bn_layers(model)
    weights = sum(parameter.numel() for parameter in build("resnet20", norm="none").parameters())
    biases = 688  # one a channel, where there is no normalizer: Fixup has its scalars instead
    assert sum(parameter.numel() for parameter in model.parameters()) == weights - biases + shifts + 2 * 9


def test_the_start_of_resnet20() -> None:
    plain, model = build("resnet20"), build("resnet20", norm="fixup")
    for stage, block in ((1, 0), (2, 0), (3, 2)):
        before = plain.get_parameter(f"layer{stage}.{block}.conv1.weight")
        after = model.get_parameter(f"layer{stage}.{block}.conv1.1.weight")
        torch.testing.assert_close(after, before * 9 ** (-1 / 2))
        assert not model.get_parameter(f"layer{stage}.{block}.conv2.1.weight").any()
    torch.testing.assert_close(model.get_parameter("conv1.1.weight"), plain.get_parameter("conv1.weight"))
    assert model(torch.randn(2, 3, 32, 32)).tolist() == [[0.0] * 10] * 2


def test_bottlenecks_have_branches_of_three() -> None:
    torch.manual_seed(0)
    plain = resnet50(weights=None)
    model = replace(resnet50(weights=None), "fixup")
    ratio = model.get_parameter("layer1.1.conv2.1.weight").std() / plain.get_parameter("layer1.1.conv2.weight").std()
    assert float(ratio.detach()) == pytest.approx(16 ** (-1 / 4), rel=0.02)
    assert not model.get_parameter("layer1.1.conv3.1.weight").any()
    assert [hasattr(model.get_submodule(f"layer1.1.bn{position}"), "scale") for position in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    # shortcuts have no activation, and so no second bias
    assert isinstance(model.get_submodule("layer2.0.downsample.1"), nn.Identity)
    assert isinstance(model.get_submodule("layer2.0.downsample.0.0"), Shift)


def test_what_scalars_do() -> None:
    shift, both = Shift(), ScaleAndShift()
    with torch.no_grad():
        shift.bias.fill_(2.0)
        both.scale.fill_(3.0)
        both.bias.fill_(4.0)
    assert shift(torch.tensor([5.0])).tolist() == [7.0]
    assert both(torch.tensor([5.0])).tolist() == [19.0]
