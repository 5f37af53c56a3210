"""Residual networks: ResNet-20 of the CIFAR experiments, and torchvision's ResNet-18 and
MobileNetV2.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.models import register_model
from fedbn_flwr.plugins import extra

SMALL_IMAGE = 64  # below this, strides and pools meant for 224 x 224 leave nothing to look at


class Shortcut(nn.Module):
    """The shortcut without parameters: every other position, and zeros for the channels that are
    new.

    He et al., "Deep Residual Learning", 2016, option A.
    """

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Subsample and pad."""
        half = self.new_channels // 2
        kept = inputs[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, half, self.new_channels - half))


class ResNet20(nn.Module):
    """ResNet-20 for small images: three stages of three blocks with 16, 32 and 64 channels.

    He et al. 2016, section 4.2. The blocks are torchvision's. Weights start as torchvision's do.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, stride=1)
        self.layer2 = _stage(16, 32, stride=2)
        self.layer3 = _stage(32, 64, stride=2)
        self.fc = nn.Linear(64, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        features = F.relu(self.bn1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(features)))
        logits: Tensor = self.fc(features.mean(dim=(2, 3)))
        return logits


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    with extra("models"):  # takes seconds to import: only who needs it pays
        from torchvision.models.resnet import BasicBlock

    shortcut = None
    if stride > 1:
        shortcut = Shortcut(stride, outputs - inputs)
    first = BasicBlock(inputs, outputs, stride, downsample=shortcut)
    return nn.Sequential(first, BasicBlock(outputs, outputs), BasicBlock(outputs, outputs))


@register_model("resnet20", smallest=8)
def resnet20(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """ResNet-20 with parameter-free shortcuts; 269,722 trainable numbers for ten classes of RGB
    images.
    """
    del image_size  # any
    return ResNet20(num_classes, in_channels)


@register_model("resnet18", smallest=8)
def resnet18(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """torchvision's ResNet-18; small images get a 3x3 stem of stride 1 and no max pool."""
    with extra("models"):  # takes seconds to import: only who needs it pays
        from torchvision import models

    model = models.resnet18(weights=None, num_classes=num_classes)
    if image_size < SMALL_IMAGE:
        model.conv1 = _stem(in_channels, 64, kernel_size=3, stride=1)
        model.maxpool = nn.Identity()
    elif in_channels != 3:
        model.conv1 = _stem(in_channels, 64, kernel_size=7, stride=2)
    return model  # type: ignore[no-any-return]


def _stem(in_channels: int, channels: int, kernel_size: int, stride: int) -> nn.Conv2d:
    stem = nn.Conv2d(
        in_channels, channels, kernel_size, stride, padding=kernel_size // 2, bias=False
    )
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    return stem


# Sandler et al., "MobileNetV2", 2018, Table 2: expansion, channels, blocks, stride of each stage;
# the second stage's stride is 1 here, for small images.
_SMALL_IMAGE_STAGES = [
    [1, 16, 1, 1],
    [6, 24, 2, 1],
    [6, 32, 3, 2],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
]


@register_model("mobilenetv2", smallest=8)
def mobilenetv2(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """torchvision's MobileNetV2; for small images the stem and the second stage have stride 1, 8 in
    all.
    """
    with extra("models"):  # takes seconds to import: only who needs it pays
        from torchvision import models

    small = image_size < SMALL_IMAGE
    stages = _SMALL_IMAGE_STAGES if small else None
    model = models.mobilenet_v2(
        weights=None, num_classes=num_classes, inverted_residual_setting=stages
    )
    if small or in_channels != 3:
        model.features[0][0] = _stem(in_channels, 32, kernel_size=3, stride=1 if small else 2)
    return model  # type: ignore[no-any-return]
