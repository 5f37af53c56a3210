"""AlexNet with BN after every layer but the last, as FedBN and FedTAN use it."""

from torch import nn

from fedbn_flwr.models.blocks import conv_bn_relu, linear_bn_relu
from fedbn_flwr.models.registry import register_model


@register_model("alexnet-bn", smallest=63)
def alexnet_bn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """AlexNet with BN and no dropout (Li et al., "FedBN", 2021, appendix D), for images of 63 and more."""
    del image_size  # the adaptive pool takes any that the convolutions leave something of
    return nn.Sequential(
        *conv_bn_relu(in_channels, 64, 11, stride=4, padding=2),
        nn.MaxPool2d(3, stride=2),
        *conv_bn_relu(64, 192, 5, padding=2),
        nn.MaxPool2d(3, stride=2),
        *conv_bn_relu(192, 384, 3, padding=1),
        *conv_bn_relu(384, 256, 3, padding=1),
        *conv_bn_relu(256, 256, 3, padding=1),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        *linear_bn_relu(256 * 6 * 6, 4096),
        *linear_bn_relu(4096, 4096),
        nn.Linear(4096, num_classes),
    )
