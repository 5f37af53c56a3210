"""A synthetic data set of any size, for tests of scale and benchmarks."""

import torch
from torch import Tensor

from fedbn_flwr.data.splits import Data, Split
from fedbn_flwr.randomness import torch_generator

#: standard deviations of the prototypes' pixels and of the noise upon them, in grey levels around 128
SPREAD, NOISE = 32.0, 64.0
#: number of samples drawn at a time, so that no float copy of the whole data set exists
CHUNK = 4096


def synthetic(n: int, test: int, classes: int, size: int, channels: int, seed: int) -> Data:
    """Make a Gaussian prototype a class, and samples with Gaussian noise around it, as bytes.

    Classes are of equal size to within one sample. The data are easy to learn, and say nothing about images.
    """
    if classes < 1 or size < 1 or channels < 1:
        raise ValueError("synthetic: classes, size and channels must be at least 1")
    if min(n, test) < classes:
        raise ValueError(f"synthetic: n={n} and test={test} must be at least the {classes} classes")
    generator = torch_generator(seed, "synthetic", "prototypes")
    prototypes = 128 + SPREAD * torch.randn(classes, channels, size, size, generator=generator)
    train = _samples(prototypes, n, torch_generator(seed, "synthetic", "train"))
    return Data("synthetic", train, _samples(prototypes, test, torch_generator(seed, "synthetic", "test")), classes)


def _samples(prototypes: Tensor, count: int, generator: torch.Generator) -> Split:
    labels = torch.arange(count) % len(prototypes)
    inputs = torch.empty((count, *prototypes.shape[1:]), dtype=torch.uint8)
    for chunk, chosen in zip(torch.split(inputs, CHUNK), torch.split(labels, CHUNK), strict=True):
        noise = torch.randn(chunk.shape, generator=generator)
        chunk.copy_(noise.mul_(NOISE).add_(prototypes[chosen]).clamp_(0, 255))
    return Split(inputs, labels)
