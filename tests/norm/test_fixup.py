"""Fixup's start by hand, and a residual network with its scalars, written from the paper's figure
1.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50

from fedbn_flwr.models import build
from fedbn_flwr.norm import bn_layers, replace
from fedbn_flwr.norm.fixup import ScaleAndShift, Shift


def reference(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return the logits of a ResNet-20 with Fixup: Zhang, Dauphin and Ma, ICLR 2019, figure 1, on
    the right.

    A branch is conv2(relu(conv1(x + b1) + b2) + b3) * scale + b4, and what follows the sum is a
    ReLU. The stem and the classifier have a bias before them, and the stem one before its ReLU.
    """

    def convolved(name: str, value: Tensor, stride: int = 1) -> Tensor:
        return F.conv2d(
            value + state[f"{name}.0.bias"], state[f"{name}.1.weight"], stride=stride, padding=1
        )

    value = F.relu(convolved("conv1", images) + state["bn1.bias"])
    for stage in (1, 2, 3):
        for block in (0, 1, 2):
            name = f"layer{stage}.{block}"
            if stage > 1 and block == 0:
                stride = 2
                half = value.shape[1] // 2
                shortcut = F.pad(value[:, :, ::2, ::2], (0, 0, 0, 0, half, half))
            else:
                stride = 1
                shortcut = value
            branch = F.relu(convolved(f"{name}.conv1", value, stride) + state[f"{name}.bn1.bias"])
            branch = (
                convolved(f"{name}.conv2", branch) * state[f"{name}.bn2.scale"]
                + state[f"{name}.bn2.bias"]
            )
            value = F.relu(branch + shortcut)
    pooled = value.mean((2, 3)) + state["fc.0.bias"]
    return pooled @ state["fc.1.weight"].T + state["fc.1.bias"]


def test_a_network_with_any_scalars_is_the_papers() -> None:
    model = build("resnet20", norm="fixup").double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
            )
    images = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    expected = reference(model.state_dict(), images)
    assert float(((model(images) - expected).abs().max() / expected.abs().max()).detach()) < 1e-12


def test_scalars_of_resnet20() -> None:
    model = build("resnet20", norm="fixup")
    shifts = sum(type(layer) is Shift for layer in model.modules())
    # before 19 convolutions, the classifier and the activations of the stem and inside the nine
    # blocks
    assert shifts == 19 + 1 + 1 + 9
    assert sum(type(layer) is ScaleAndShift for layer in model.modules()) == 9
    assert not bn_layers(model)
    weights = sum(parameter.numel() for parameter in build("resnet20", norm="none").parameters())
    biases = 688  # one a channel, where there is no normalizer: Fixup has its scalars instead
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == weights - biases + shifts + 2 * 9
    )


def test_the_start_of_resnet20() -> None:
    plain, model = build("resnet20"), build("resnet20", norm="fixup")
    for stage, block in ((1, 0), (2, 0), (3, 2)):
        before = plain.get_parameter(f"layer{stage}.{block}.conv1.weight")
        after = model.get_parameter(f"layer{stage}.{block}.conv1.1.weight")
        torch.testing.assert_close(after, before * 9 ** (-1 / 2))
        assert not model.get_parameter(f"layer{stage}.{block}.conv2.1.weight").any()
    torch.testing.assert_close(
        model.get_parameter("conv1.1.weight"), plain.get_parameter("conv1.weight")
    )
    assert model(torch.randn(2, 3, 32, 32)).tolist() == [[0.0] * 10] * 2


def test_bottlenecks_have_branches_of_three() -> None:
    torch.manual_seed(0)
    plain = resnet50(weights=None)
    model = replace(resnet50(weights=None), "fixup")
    ratio = (
        model.get_parameter("layer1.1.conv2.1.weight").std()
        / plain.get_parameter("layer1.1.conv2.weight").std()
    )
    assert float(ratio.detach()) == pytest.approx(16 ** (-1 / 4), rel=0.02)
    assert not model.get_parameter("layer1.1.conv3.1.weight").any()
    assert [
        hasattr(model.get_submodule(f"layer1.1.bn{position}"), "scale") for position in (1, 2, 3)
    ] == [
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
