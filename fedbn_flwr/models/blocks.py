"""The two building blocks of the plain networks."""

from torch import nn


def conv_bn_relu(
    inputs: int, outputs: int, kernel_size: int, stride: int = 1, padding: int = 0, bias: bool = True
) -> list[nn.Module]:
    """A convolution, BN, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=bias)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def linear_bn_relu(inputs: int, outputs: int) -> list[nn.Module]:
    """A linear layer, BN, ReLU."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
