"""What the diagnosis measures: by hand, against centralized BN, and at the extremes."""

from collections.abc import Iterator, Sequence
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.data import load, partition
from fedbn_flwr.data.splits import Batch
from fedbn_flwr.diagnosis import Diagnosis, DrawnBatches, diagnose, overall
from tests.helpers.layerwise_references import (
    Gradients,
    gradients,
    heterogeneous_batches,
    mean_gradient,
    relative_error,
    small_network,
    weighted_gradients,
)

SIZES = [4, 3, 5]
#: not in proportion to the sizes
WEIGHTS = [0.5, 0.3, 0.2]
DRAW = heterogeneous_batches(SIZES, (1, 8, 8))


def flat(named: Gradients) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in named.values()])


def norm(left: Gradients, right: Gradients) -> float:
    return float((flat(left) - flat(right)).norm())


def test_clients_with_equal_data_have_no_distance_no_error_and_no_deviation() -> None:
    actual = diagnose(small_network(), [[DRAW[0]] * 3] * 2, WEIGHTS).actual
    distances = [
        value
        for layer in actual.layers
        for value in (*layer.mean, *layer.variance, *layer.gradients)
    ]
    assert len(distances) == 2 * 3 * 3
    assert max(distances) < 1e-10
    assert max(actual.errors.values()) < 1e-10
    assert max(*actual.deviation, *actual.heterogeneity) < 1e-10
    assert actual.gradient_norm > 1e-3


def test_errors_and_deviations_are_those_against_the_slow_reference() -> None:
    actual = diagnose(small_network(), [DRAW], WEIGHTS).actual
    whole = weighted_gradients(small_network(), DRAW, WEIGHTS)
    exact = gradients(small_network(), DRAW, WEIGHTS, F.cross_entropy)
    forward = gradients(small_network(), DRAW, WEIGHTS, F.cross_entropy, mode="forward")
    local = [gradients(small_network(), [batch], [1.0], F.cross_entropy)[0] for batch in DRAW]
    assert actual.errors["both"] < 1e-10
    assert actual.errors["nothing"] == pytest.approx(
        relative_error(mean_gradient(local, WEIGHTS), whole)
    )
    assert actual.errors["statistics"] == pytest.approx(
        relative_error(mean_gradient(forward, WEIGHTS), whole)
    )
    assert actual.errors["gradients"] > 0.01
    assert actual.gradient_norm == pytest.approx(float(flat(whole).norm()))
    assert actual.deviation == pytest.approx(
        [norm(a, b) for a, b in zip(local, exact, strict=True)]
    )
    assert actual.heterogeneity == pytest.approx([norm(gradient, whole) for gradient in exact])


def test_squares_are_averaged_over_the_draws() -> None:
    other = heterogeneous_batches(SIZES, (1, 8, 8), seed=1)
    one, two, both = (
        diagnose(small_network(), draws, WEIGHTS).actual
        for draws in ([DRAW], [other], [DRAW, other])
    )
    wanted = [sqrt((a**2 + b**2) / 2) for a, b in zip(one.deviation, two.deviation, strict=True)]
    assert both.deviation == pytest.approx(wanted)


def test_distances_of_one_layer_by_hand() -> None:
    """Client 0 has the values 0 and 2, client 1 has 4 and 8.

    Equal weights; loss: mean of the outputs times c_i.

    Means 1 and 6, variances 1 and 4: m = 3.5, v = (1 + 6.25 + 4 + 6.25) / 2 = 8.75. With y = w x
    and m, v of y, w = 1, and F_i the mean of c_i y over the client's values, g = c_i / 2 for each:
    dF_i/dm = -c_i / sqrt(v) and dF_i/dv = -c_i sum(x - m) / (4 v^1.5) = -c_i (m_i - m) / (2 v^1.5).
    In units of the layer: sqrt(v) dF_i/dm = -c_i, v dF_i/dv = -c_i (m_i - m) / (2 sqrt(v)).
    """
    model = (
        nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False, eps=0))
        .double()
        .train()
    )
    nn.init.ones_(next(model.parameters()))
    targets = [torch.full((2,), 1.0).double(), torch.full((2,), 3.0).double()]
    values = [torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[4.0], [8.0]]).double()]
    draw = list(zip(values, targets, strict=True))
    (layer,) = diagnose(
        model, [draw], [1, 1], lambda out, c: (out.flatten() * c).mean()
    ).actual.layers
    assert layer.name == "1"
    assert layer.mean == pytest.approx([2.5 / sqrt(8.75)] * 2)
    assert layer.variance == pytest.approx([7.75 / 8.75, 4.75 / 8.75])
    slope = 2.5 / (2 * sqrt(8.75))
    own = torch.tensor([[-1, slope], [-3, -3 * slope]])
    pooled = own.mean(0)
    assert layer.gradients == pytest.approx(((own - pooled).norm(dim=1) / pooled.norm()).tolist())


def test_a_layer_on_the_data_has_no_gradients_to_share() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10)).double().train()
    (layer,) = diagnose(model, [DRAW], WEIGHTS).actual.layers
    assert len(layer.mean) == 3
    assert layer.gradients == []


def digits(spec: str) -> Diagnosis:
    data = load("digits")
    held = [torch.from_numpy(indices) for indices in partition(spec, data, 5, 0)]
    draws: list[list[Batch]] = []
    for part in range(2):
        batches = [data.train.batch(indices[part * 32 : (part + 1) * 32]) for indices in held]
        draws.append([(inputs.double(), targets) for inputs, targets in batches])
    return diagnose(small_network(), draws, [1] * 5)


def test_two_classes_a_client_are_farther_apart_than_clients_that_are_alike() -> None:
    alike, apart = digits("iid"), digits("classes:2")
    for what in ("mean", "variance", "gradients"):
        for one, other in zip(alike.actual.layers, apart.actual.layers, strict=True):
            assert overall(alike.weights, getattr(one, what)) < overall(
                apart.weights, getattr(other, what)
            )
    assert alike.actual.errors["nothing"] < apart.actual.errors["nothing"]
    assert alike.actual.errors["statistics"] < apart.actual.errors["statistics"]
    assert overall(alike.weights, alike.actual.heterogeneity) < overall(
        apart.weights, apart.actual.heterogeneity
    )


def test_the_model_stays_as_it_is_and_mini_batches_may_be_of_one_sample() -> None:
    model = (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
        .double()
        .train()
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    diagnosis = diagnose(model, [heterogeneous_batches([1, 1], (1, 8, 8))], [1, 1])
    assert diagnosis.batch_sizes == [1, 1]
    assert diagnosis.actual.layers[0].variance == [1, 1]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "forward" not in model[2].__dict__


def test_progress_goes_twice_through_the_draws() -> None:
    draws = [DRAW, [DRAW[0]] * 3]
    seen: list[int] = []

    def progress(given: Sequence[DrawnBatches]) -> Iterator[DrawnBatches]:
        for place, draw in enumerate(given):
            yield draw
            seen.append(place)

    shown = diagnose(small_network(), draws, WEIGHTS, progress=progress)
    assert seen == [0, 1] * 2
    assert shown == diagnose(small_network(), draws, WEIGHTS)
