"""torchvision's MobileNetV2, fitted to the size of the images."""

from torch import nn

from fedbn_flwr.models.registry import register_model
from fedbn_flwr.models.resnet import SMALL_IMAGE
from fedbn_flwr.plugins import extra

# Sandler et al., "MobileNetV2", 2018, Table 2: expansion, channels, blocks, stride of each stage; the second
# stage's stride is 1 here, for small images.
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
    """torchvision's MobileNetV2; for small images the stem and the second stage have stride 1, 8 in all."""
    with extra("models"):  # takes seconds to import: only who needs it pays
        from torchvision import models

    small = image_size < SMALL_IMAGE
    stages = _SMALL_IMAGE_STAGES if small else None
    model = models.mobilenet_v2(weights=None, num_classes=num_classes, inverted_residual_setting=stages)
    if small or in_channels != 3:
        stem = nn.Conv2d(in_channels, 32, 3, stride=1 if small else 2, padding=1, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out")
        model.features[0][0] = stem
    return model  # type: ignore[no-any-return]
