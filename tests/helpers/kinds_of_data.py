"""Small data of several kinds, and models in float64 for each."""

import torch
from torch import Tensor, nn

from tests.helpers.harness import Double

Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
TRAINING, ALL = 90, 120


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _pair(inputs: Tensor, targets: Tensor) -> Pair:
    return (inputs[:TRAINING], targets[:TRAINING]), (inputs[TRAINING:], targets[TRAINING:])


def label_maps() -> Pair:
    """Images with a class at each pixel; some pixels have none."""
    images = torch.rand(ALL, 1, 4, 4, generator=_generator())
    maps = (3 * images[:, 0]).long()
    maps[:, 0, :2] = -100
    return _pair(images, maps)


def two_targets() -> Pair:
    """Images with two numbers each."""
    images = torch.rand(ALL, 1, 4, 4, generator=_generator())
    return _pair(images, torch.stack([images.mean((1, 2, 3)), images[:, 0, 0, 0]], 1))


def pictures() -> Pair:
    """Images whose targets are images."""
    images = torch.rand(ALL, 1, 4, 4, generator=_generator())
    return _pair(images + 1, 2 * images)


def tokens() -> Pair:
    """Sequences of six tokens."""
    ids = torch.randint(20, (ALL, 6), generator=_generator())
    return _pair(ids, ids.sum(1) % 3)


def each_pixel(num_classes: int) -> nn.Module:
    """Return a model with a class for each pixel."""
    first = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    return Double(nn.Sequential(*first, nn.Conv2d(4, num_classes, 1)))


def denoiser() -> nn.Module:
    """Return a model that gives an image."""
    return each_pixel(1)


class OfTokens(nn.Module):
    """The mean of embedded tokens, with BN and a linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, num_classes)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.embedding(ids).mean(1)))
        return result
