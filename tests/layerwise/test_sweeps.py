"""Sweeps: between local BN (none) and FedTAN (as many as layers)."""

import copy
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.layerwise import (
    Answer,
    Auto,
    Kind,
    Request,
    backward_sweep,
    combine,
    correct,
    correction,
    forward_sweep,
    gradients,
    movement,
    pool,
    settle_corrections,
)
from fedbn_flwr.models import build
from tests.helpers.layerwise_references import (
    Gradients,
    centralized_gradients,
    heterogeneous_batches,
    largest_difference,
    made,
    mean_gradient,
    relative_error,
    small_network,
)

SIZES = [4, 3, 5]
WEIGHTS = [4 / 12, 3 / 12, 5 / 12]
BATCHES = heterogeneous_batches(SIZES, (1, 8, 8))

Seen = list[Sequence[Sequence[Request]]]


def resnet20() -> nn.Module:
    return made(lambda: build("resnet20", in_channels=1, image_size=8))


def test_no_sweep_is_federated_averaging_with_local_batch_normalization() -> None:
    model, local = resnet20(), [resnet20() for _ in BATCHES]
    found = gradients(model, BATCHES, WEIGHTS, F.cross_entropy, sweeps=0)
    for mine, client, batch in zip(found, local, BATCHES, strict=True):
        assert relative_error(mine, centralized_gradients(client, [batch])) < 1e-12
    states = [client.state_dict() for client in local]
    for key, value in model.state_dict().items():
        if "running" in key:
            wanted = combine("mean", [state[key] for state in states], WEIGHTS)
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def error(sweeps: int | Auto, wanted: Gradients) -> float:
    found = gradients(resnet20(), BATCHES, WEIGHTS, F.cross_entropy, sweeps=sweeps)
    return relative_error(mean_gradient(found, WEIGHTS), wanted)


def test_more_sweeps_are_better_and_more_than_layers_change_nothing() -> None:
    wanted = centralized_gradients(resnet20(), BATCHES)
    none, two, ten, more = (error(sweeps, wanted) for sweeps in (0, 2, 10, 21))
    assert none > two > ten > 1e-4
    assert more < 1e-10


def test_after_k_sweeps_the_statistics_of_k_layers_are_exact() -> None:
    layerwise: Seen = []
    swept: Seen = []
    model, weights = small_network(), [1.0, 2.0]
    batches = heterogeneous_batches([3, 4], (1, 6, 6))
    gradients(copy.deepcopy(model), batches, weights, F.cross_entropy, observe=layerwise.append)
    gradients(model, batches, weights, F.cross_entropy, sweeps=2, observe=swept.append)
    # One layer at a time: statistics of 1 and 4, gradients of 4 and 1. Swept: both, in the order of the pass.
    exact = [combine(each[0][0].kind, [client[0].tensor for client in each], weights) for each in layerwise]
    pooled = [
        [combine(said[0].kind, [each.tensor for each in said], weights) for said in zip(*each, strict=True)]
        for each in swept
    ]

    def close(found: Tensor, wanted: Tensor) -> bool:
        return torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)

    forward_1, forward_2, backward_1, backward_2 = pooled
    assert [close(f, e) for f, e in zip(forward_1, exact[:2], strict=True)] == [True, False]
    assert [close(f, e) for f, e in zip(forward_2, exact[:2], strict=True)] == [True, True]
    assert [close(f, e) for f, e in zip(backward_1, exact[2:], strict=True)] == [True, False]
    assert [close(f, e) for f, e in zip(backward_2, exact[2:], strict=True)] == [True, True]


@pytest.mark.parametrize("kind", ["statistics", "gradients"])
def test_a_correction_takes_what_was_said_to_the_global_values(kind: Kind) -> None:
    # the third channel is constant at this client, the fourth everywhere
    said = Request(kind, "bn", torch.tensor([[1.0, -2, 3, 0], [4, 0.5, 0, 0]], dtype=torch.float64), 6)
    pooled = Answer(torch.tensor([[2.0, 0, 5, 0], [1, 8, 2, 0]], dtype=torch.float64), 30)
    found = correct(said, correction(said, pooled))
    torch.testing.assert_close(found.tensor, pooled.tensor, rtol=1e-12, atol=1e-12)
    assert found.count == 30
    assert kind == "gradients" or bool((found.tensor[1] >= 0).all())


def test_one_sample_a_client() -> None:
    def model() -> nn.Module:
        return made(
            lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
        )

    batches, weights = heterogeneous_batches([1, 1, 1], (5,)), [1 / 3] * 3
    batches = [(inputs, targets % 4) for inputs, targets in batches]
    swept, centralized = model(), model()
    found = gradients(swept, batches, weights, F.cross_entropy, sweeps=2)
    wanted = centralized_gradients(centralized, batches)
    assert relative_error(mean_gradient(found, weights), wanted) < 1e-10
    assert largest_difference(swept, centralized) < 1e-12
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        gradients(model(), batches, weights, F.cross_entropy, sweeps=0)


def test_dropout_has_the_same_masks_in_every_sweep() -> None:
    model = small_network()
    model.insert(6, nn.Dropout(0.4))  # type: ignore[operator]
    batches = heterogeneous_batches([3, 4], (1, 6, 6))
    swept = gradients(model, batches, [3, 4], F.cross_entropy, sweeps=2, seed=5)
    for mine, fedtan in zip(swept, gradients(model, batches, [3, 4], F.cross_entropy, seed=5), strict=True):
        assert relative_error(mine, fedtan) < 1e-10
    (other, _) = gradients(model, batches, [3, 4], F.cross_entropy, seed=6)
    assert relative_error(other, swept[0]) > 1e-3


def test_a_sweep_leaves_nothing_behind() -> None:
    model = small_network()
    inputs, targets = heterogeneous_batches([3], (1, 6, 6))[0]
    before = copy.deepcopy(model.state_dict())

    def loss() -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    forward = [forward_sweep(model, loss, 0, {}) for _ in range(2)]
    backward = [backward_sweep(model, loss, 0, {}, {}) for _ in range(2)]
    for first, second in (forward, backward):
        assert sorted(first) == ["1", "4"]
        assert all(torch.equal(first[layer].tensor, second[layer].tensor) for layer in first)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def exchanges(model: nn.Module, sweeps: Auto, batches: list[tuple[Tensor, Tensor]]) -> int:
    seen: Seen = []
    gradients(model, batches, [1] * len(batches), F.cross_entropy, sweeps=sweeps, observe=seen.append)
    return len(seen) + 1


def test_automatic_sweeps_stop_when_nothing_moves() -> None:
    same = [BATCHES[0], BATCHES[0]]
    # equal clients: the second sweep says what the first did, each way
    assert exchanges(resnet20(), Auto(tolerance=1e-9), same) == 2 + 2 + 1
    assert exchanges(resnet20(), Auto(tolerance=0, most=3), BATCHES) == 3 + 3 + 1
    assert 5 < exchanges(resnet20(), Auto(tolerance=0.01, most=19), BATCHES) < 19 + 19 + 1


def test_automatic_sweeps_without_a_tolerance_are_exact() -> None:
    assert exchanges(resnet20(), Auto(tolerance=0, most=100), BATCHES) == 19 + 19 + 1
    assert error(Auto(tolerance=0, most=100), centralized_gradients(resnet20(), BATCHES)) < 1e-10
    assert exchanges(small_network(), Auto(tolerance=0), heterogeneous_batches([3, 4], (1, 6, 6))) == 2 + 2 + 1


def test_movement_by_hand() -> None:
    def one(mean: float, variance: float) -> Mapping[str, Answer]:
        return {"bn": Answer(torch.tensor([[mean], [variance]], dtype=torch.float64), 1)}

    # the mean moves by 1 where the deviation is 2; the variance from 3 to 4
    assert movement(one(0, 4), one(1, 4)) == pytest.approx(0.5, rel=1e-4)
    assert movement(one(1, 3), one(1, 4)) == pytest.approx(0.25, rel=1e-4)
    assert movement({}, one(1, 4)) == float("inf")
    assert movement(one(1, 0), one(1, 0)) == 0  # a channel that is the same everywhere


def test_pooling_checks_what_was_said() -> None:
    good = {"bn": Request("statistics", "bn", torch.ones(2, 3), 4)}
    bad = {"bn": Request("statistics", "bn", torch.full((2, 3), torch.nan), 4)}
    with pytest.raises(ValueError, match="client 1: the statistics of BN layer 'bn' is not finite"):
        pool([good, bad], [1, 1])


def test_settling_hands_each_client_its_own_corrections() -> None:
    asked: list[list[Mapping[str, Answer]]] = []
    own = [torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [1.0]])]

    def ask(corrections: list[Mapping[str, Answer]]) -> list[dict[str, Request]]:
        asked.append(corrections)
        return [{"bn": Request("statistics", "bn", each, 5)} for each in own]

    # mean 2 and variance 1 + 4 = 5: offsets of +2 and -2 deviations, variances times 5
    final, sweeps = settle_corrections(ask, 2, lambda: [1, 1], 2)
    assert sweeps == 2
    assert asked[0] == [{}, {}]
    for corrections in (asked[1], final):
        found = torch.stack([each["bn"].tensor.flatten() for each in corrections])
        torch.testing.assert_close(found, torch.tensor([[2.0, 5.0], [-2.0, 5.0]]), rtol=1e-4, atol=1e-4)


def test_sweeps_exclude_the_other_exchanges() -> None:
    with pytest.raises(ValueError, match="sweeps are always fused"):
        gradients(small_network(), BATCHES, WEIGHTS, F.cross_entropy, exchange="paper", sweeps=1)


def test_the_word_auto() -> None:
    fresh = [gradients(small_network(), BATCHES, WEIGHTS, F.cross_entropy, sweeps=s) for s in ("auto", Auto())]
    assert relative_error(fresh[0][0], fresh[1][0]) == 0
