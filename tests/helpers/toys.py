"""A small data set, a small model, random states, and a comparison of states."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr.data import Split
from fedbn_flwr.state.records import InMemoryArray

CLASSES = 4


def toy_split(
    count: int = 20, seed: int = 0, domains: Sequence[int] | None = None, size: int = 6
) -> Split:
    """Return noisy images whose brightness tells their class; labels go round."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    inputs = torch.randn((count, 1, size, size), generator=generator) + labels.reshape(-1, 1, 1, 1)
    places = None if domains is None else torch.tensor(domains)
    return Split(inputs, labels, places)


def toy_cnn(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """Return a convolution, BN, dropout and a linear layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(3 * 16, CLASSES),
        )


def hold(value: NDArray[Any]) -> InMemoryArray:
    """Return an array with a copy of these numbers, in the memory order of `np.save`."""
    return InMemoryArray(np.array(value, order="A"))


def random_state(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return a state of the model without equal numbers; variances are positive, counters whole."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for position, (name, value) in enumerate(model.state_dict().items()):
        if value.is_floating_point():
            state[name] = torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.1
        else:
            state[name] = torch.full_like(value, 3 + position)
    return state


def assert_same_state(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check names, their order, dtypes, shapes and bits."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name
