"""Models in float64, by names that processes of their own can import: "tests.helpers.doubles:perceptron"."""

from torch import nn

from tests.helpers.harness import Double


def perceptron(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return two linear layers, with BN and dropout between them."""
    inputs = nn.Flatten(), nn.Linear(in_channels * image_size**2, 12)
    return Double(nn.Sequential(*inputs, nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, num_classes)))


def convolutions(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return two convolutions with BN, and a linear layer."""
    first = nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()
    head = nn.Flatten(), nn.Linear(6 * ((image_size + 1) // 2) ** 2, num_classes)
    return Double(nn.Sequential(*first, *second, *head))
