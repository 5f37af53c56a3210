"""The two networks of FedBS (Janati Idrissi et al., "FedBS", 2021, section V)."""

from torch import nn

from fedbn_flwr.models.blocks import conv_bn_relu
from fedbn_flwr.models.registry import register_model


@register_model("fedbs-mnist-cnn", smallest=28, largest=28)
def fedbs_mnist_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Two padded 5x5 convolutions of 16 and 32 channels, each pooled, and a linear layer of 1,568 inputs."""
    del image_size  # 28: two pools leave 7 x 7 positions of 32 channels
    return nn.Sequential(
        *conv_bn_relu(in_channels, 16, 5, padding=2),
        nn.MaxPool2d(2),
        *conv_bn_relu(16, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, num_classes),
    )


@register_model("fedbs-cifar-cnn", smallest=32, largest=32)
def fedbs_cifar_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Convolutions of 100, 150, 250 and 500 channels, and linear layers of 4,500, 270 and 150 inputs.

    Deviation: the paper pools after all four convolutions, which cannot leave its 4,500 inputs. Without the
    last pool, with the 5x5 convolution unpadded and the 3x3 ones padded, they are 3 x 3 x 500.
    """
    del image_size  # 32
    return nn.Sequential(
        *conv_bn_relu(in_channels, 100, 5),
        nn.MaxPool2d(2),
        *conv_bn_relu(100, 150, 3, padding=1),
        nn.MaxPool2d(2),
        *conv_bn_relu(150, 250, 3, padding=1),
        nn.MaxPool2d(2),
        *conv_bn_relu(250, 500, 3, padding=1),
        nn.Flatten(),
        nn.Linear(3 * 3 * 500, 270),
        nn.ReLU(),
        nn.Linear(270, 150),
        nn.ReLU(),
        nn.Linear(150, num_classes),
    )
