"""Networks that give each pixel a class: DeepLabV3+, as FixBN's on Cityscapes, and a small one for
small images.
"""

from torch import nn

from fedbn_flwr.models import register_model
from fedbn_flwr.models.plain import conv_bn_relu
from fedbn_flwr.plugins import extra

TASK = "segmentation"


@register_model("small-fcn", smallest=8, task=TASK)
def small_fcn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Three 3x3 convolutions with BN and ReLU at half the size, the third dilated, and a class for
    each pixel.
    """
    del image_size  # any that is even
    return nn.Sequential(
        *conv_bn_relu(in_channels, 16, 3, padding=1, bias=False),
        *conv_bn_relu(16, 32, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(32, 32, 3, padding=3, dilation=3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, num_classes, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )


@register_model("deeplabv3plus-mobilenetv2", smallest=32, task=TASK)
def deeplabv3plus_mobilenetv2(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """DeepLabV3+ with MobileNetV2 as its encoder; sides of images are multiples of 16."""
    del image_size
    return _deeplabv3plus("mobilenet_v2", num_classes, in_channels)


@register_model("deeplabv3plus-resnet50", smallest=32, task=TASK)
def deeplabv3plus_resnet50(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """DeepLabV3+ with ResNet-50 as its encoder; sides of images are multiples of 16."""
    del image_size
    return _deeplabv3plus("resnet50", num_classes, in_channels)


def _deeplabv3plus(encoder: str, num_classes: int, in_channels: int) -> nn.Module:
    """Build the network of segmentation-models-pytorch with output stride 16, as FixBN (appendix
    A.1).

    Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image
    Segmentation", 2018. Nothing is downloaded: all weights are drawn, and `init-from` replaces
    them.
    """
    with extra("segmentation"):  # takes seconds to import: only who needs it pays
        from segmentation_models_pytorch import DeepLabV3Plus

    model: nn.Module = DeepLabV3Plus(
        encoder,
        encoder_weights=None,
        encoder_output_stride=16,
        in_channels=in_channels,
        classes=num_classes,
    )
    return model
