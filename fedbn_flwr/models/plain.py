"""The plain networks of the papers: convolutions and linear layers with BN and ReLU, one after
another.
"""

from torch import nn

from fedbn_flwr.models import register_model


def conv_bn_relu(
    inputs: int,
    outputs: int,
    kernel_size: int,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
) -> list[nn.Module]:
    """A convolution, BN, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=bias)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def linear_bn_relu(inputs: int, outputs: int) -> list[nn.Module]:
    """A linear layer, BN, ReLU."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


@register_model("mlp")
def mlp(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Build a perceptron with one hidden layer of 30 and BN: 784-30-10 on MNIST (Wang et al.,
    "FedTAN", 2023).
    """
    return nn.Sequential(
        nn.Flatten(),
        *linear_bn_relu(in_channels * image_size**2, 30),
        nn.Linear(30, num_classes),
    )


@register_model("lenet", smallest=16)
def lenet(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) as it is used today: ReLU, max pools, and BN after each
    convolution.
    """
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
    """Three 3x3 convolutions of 16, 32 and 32 channels, each with BN and ReLU, and a global average
    pool.
    """
    del image_size  # any
    return nn.Sequential(
        *conv_bn_relu(in_channels, 16, 3, padding=1, bias=False),
        *conv_bn_relu(16, 32, 3, stride=2, padding=1, bias=False),
        *conv_bn_relu(32, 32, 3, stride=2, padding=1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


@register_model("fedbs-mnist-cnn", smallest=28, largest=28)
def fedbs_mnist_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Two padded 5x5 convolutions of 16 and 32 channels, each pooled, and a linear layer of 1,568
    inputs.
    """
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
    """Convolutions of 100, 150, 250 and 500 channels, and linear layers of 4,500, 270 and 150
    inputs.

    Deviation: the paper pools after all four convolutions, which cannot leave its 4,500 inputs.
    Without the last pool, with the 5x5 convolution unpadded and the 3x3 ones padded, they are 3 x 3
    x 500.
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


@register_model("digits-cnn", smallest=28, largest=28)
def digits_cnn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Three convolutions and three linear layers, BN after all but the last (Li et al., "FedBN",
    2021).

    FedWon calls the same network a five-layer CNN; this is the one that FedBN published (its
    appendix D).
    """
    del image_size  # 28: two pools leave 7 x 7 positions of 128 channels
    return nn.Sequential(
        *conv_bn_relu(in_channels, 64, 5, padding=2),
        nn.MaxPool2d(2),
        *conv_bn_relu(64, 64, 5, padding=2),
        nn.MaxPool2d(2),
        *conv_bn_relu(64, 128, 5, padding=2),
        nn.Flatten(),
        *linear_bn_relu(7 * 7 * 128, 2048),
        *linear_bn_relu(2048, 512),
        nn.Linear(512, num_classes),
    )


@register_model("alexnet-bn", smallest=63)
def alexnet_bn(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """AlexNet with BN and no dropout (Li et al., "FedBN", 2021, appendix D), for images of 63 and
    more.
    """
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
