"""Data as an experiment asks for them: the numbers of classes, the normalization, without domains."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.data.splits import Data


def renumbered(data: Data, class_names: Sequence[str]) -> Data:
    """Return the data with each class's number its position in a list, which may name further classes.

    A class that the list does not name is a ValueError, and so are classes without names.
    """
    if not data.class_names:
        raise ValueError(f"{data.name}: its classes have no names, so they cannot be numbered by name")
    for name in data.class_names:
        if name not in class_names:
            raise ValueError(f"{data.name}: its class {name!r} is none of {', '.join(class_names)}")
    numbers = torch.tensor([list(class_names).index(name) for name in data.class_names])
    train, test = (replace(split, labels=numbers[split.labels]) for split in (data.train, data.test))
    return replace(data, train=train, test=test, num_classes=len(class_names), class_names=tuple(class_names))


def normalized(data: Data, mean: Channels, std: Channels) -> Data:
    """Return the data with this mean and standard deviation, one number a channel, in place of their own."""
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != data.in_channels:
            raise ValueError(f"{data.name}: {name} has {len(numbers)} numbers for {data.in_channels} channels")
    train, test = (replace(split, mean=mean, std=std) for split in (data.train, data.test))
    return replace(data, train=train, test=test)


def without_domains(data: Data) -> Data:
    """Return the data as one domain."""
    train, test = (replace(split, domains=None) for split in (data.train, data.test))
    return replace(data, train=train, test=test, domain_names=())
