"""On whole models: the weighted mean of the clients' gradients is the gradient of centralized BN."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch.nn.functional as F
import torchvision
from torch import nn

from fedbn_flwr.layerwise import Mode
from fedbn_flwr.models import build
from tests.helpers.layerwise_gradients import gradients
from tests.helpers.layerwise_references import (
    centralized_gradients,
    heterogeneous_batches,
    largest_difference,
    made,
    mean_gradient,
    relative_error,
)

SIZES = [3, 1, 4]
WEIGHTS = [3 / 8, 1 / 8, 4 / 8]


def resnet20() -> nn.Module:
    return build("resnet20", in_channels=1, image_size=8)


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)  # type: ignore[no-any-return]


def case(make: Callable[[], nn.Module], *shape: int, slow: bool = False) -> object:
    return pytest.param(make, shape, id=make.__name__, marks=[pytest.mark.slow] if slow else [])


MODELS = [
    case(resnet20, 1, 8, 8),
    case(resnet18, 3, 32, 32, slow=True),
]


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_exact_with_both_exchanges_and_not_with_forward_alone(
    make: Callable[[], nn.Module], shape: Sequence[int]
) -> None:
    model, batches = made(make), heterogeneous_batches(SIZES, shape)
    centralized = copy.deepcopy(model)
    wanted = centralized_gradients(centralized, batches)

    def error(exchange: Mode) -> float:
        fresh = copy.deepcopy(model)
        found = mean_gradient(gradients(fresh, batches, WEIGHTS, F.cross_entropy, exchange), WEIGHTS)
        assert largest_difference(fresh, centralized) < 1e-10, "running statistics"
        return relative_error(found, wanted)

    assert error("paper") < 1e-10
    assert error("fused") < 1e-10
    assert error("forward") > 0.1
