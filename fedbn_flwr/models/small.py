"""The small networks of the papers' first experiments."""

from torch import nn

from fedbn_flwr.models.blocks import conv_bn_relu, linear_bn_relu
from fedbn_flwr.models.registry import register_model


@register_model("mlp")
def mlp(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Build a perceptron with one hidden layer of 30 and BN: 784-30-10 on MNIST (Wang et al., "FedTAN", 2023)."""
    return nn.Sequential(
        nn.Flatten(),
        *linear_bn_relu(in_channels * image_size**2, 30),
        nn.Linear(30, num_classes),
    )


@register_model("lenet", smallest=16)
def lenet(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) as it is used today: ReLU, max pools, and BN after each convolution."""
    side = ((image_size - 4) // 2 - 4) // 2
    return nn.Sequential(
        *conv_bn_relu(in_channels, 6, 5, bias=False),
        nn.MaxPool2d(2),
        *conv_bn_relu(6, 16, 5, bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


@register_model("small-cnn", smallest=8)
def small_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Three 3x3 convolutions of 16, 32 and 32 channels, each with BN and ReLU, and a global average pool."""
    del image_size  # any
    return nn.Sequential(
        *conv_bn_relu(in_channels, 16, 3, padding=1, bias=False),
        *conv_bn_relu(16, 32, 3, stride=2, padding=1, bias=False),
        *conv_bn_relu(32, 32, 3, stride=2, padding=1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
