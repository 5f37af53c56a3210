"""Every kind of BN layer, every place it may have in a model."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap

from fedbn_flwr.layerwise import Answer, Mode, Requests, SharedBatchNorm, shared_statistics
from fedbn_flwr.layerwise.exchange import OrderError
from fedbn_flwr.layerwise.shared_batch_norm import Use
from fedbn_flwr.layerwise.shared_statistics import UnlikeBatchNormError
from fedbn_flwr.models import build
from fedbn_flwr.norm import bn_layers
from tests.helpers.layerwise_references import (
    Batch,
    centralized_gradients,
    gradients,
    heterogeneous_batches,
    largest_difference,
    made,
    mean_gradient,
    relative_error,
    small_network,
    weighted_gradients,
)
from tests.helpers.other_shapes import held_in_passes

Apply = Callable[..., tuple[Tensor, ...]]


def alone(request: Requests) -> Answer:
    """The exchange of a single client."""
    return Answer(request.tensor, request.counts[0])


def assert_centralized(model: nn.Module, batches: Sequence[Batch], buffers: float = 1e-12) -> None:
    sizes = [len(targets) for _, targets in batches]
    weights = [size / sum(sizes) for size in sizes]
    centralized = copy.deepcopy(model)
    wanted = centralized_gradients(centralized, batches)
    for exchange in ("paper", "fused"):
        fresh = copy.deepcopy(model)
        found = gradients(fresh, batches, weights, F.cross_entropy, exchange)
        assert relative_error(mean_gradient(found, weights), wanted) < 1e-10
        assert largest_difference(fresh, centralized) < buffers


@pytest.mark.parametrize("name", ["resnet20", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_whole_models_are_exact(name: str) -> None:
    batches = heterogeneous_batches([3, 1, 4], (3, 32, 32))
    assert_centralized(made(lambda: build(name, image_size=32)), batches, buffers=1e-10)


def vectors() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 10)
    )


@pytest.mark.parametrize("entry", ["bias", "weight"])
def test_layers_may_have_one_of_weight_and_bias(entry: str) -> None:
    model = small_network()
    for layer in bn_layers(model).values():
        layer.register_parameter(entry, None)
    assert_centralized(model, heterogeneous_batches([3, 2], (1, 4, 4)))


def test_synchronized_batch_normalization_is_batch_normalization() -> None:
    model, batches = small_network(), heterogeneous_batches([3, 2], (1, 4, 4))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in bn_layers(synchronized).values())
    found = gradients(synchronized, batches, [0.6, 0.4], F.cross_entropy)
    for mine, plain in zip(
        found, gradients(model, batches, [0.6, 0.4], F.cross_entropy), strict=True
    ):
        assert relative_error(mine, plain) == 0


@pytest.mark.parametrize(
    ("sizes", "mode", "reason"),
    [
        ([1], "fused", "more than 1 value per channel over all clients"),
        ([2, 0], "fused", "an empty mini-batch has no statistics"),
        ([3], "fussed", "unknown mode 'fussed'; known: paper, fused, forward"),
    ],
)
def test_what_has_no_statistics_is_refused(sizes: list[int], mode: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gradients(
            made(vectors),
            heterogeneous_batches(sizes, (5,)),
            [1] * len(sizes),
            F.cross_entropy,
            mode,
        )


class Twice(nn.Module):
    """One BN layer, used twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bn, self.outer = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.bn(self.inner(self.bn(x).tanh())))  # type: ignore[no-any-return]


def test_a_layer_used_twice_has_exchanges_of_each_use() -> None:
    batches = heterogeneous_batches([3, 1, 2], (5,))
    assert_centralized(made(Twice), batches)
    seen: list[Requests] = []
    gradients(made(Twice), batches, [3, 1, 2], F.cross_entropy, observe=seen.append)
    said = [(each.kind, each.layer) for each in seen]
    # the first use's inputs are data: nobody needs their gradients
    assert said == [("statistics", "bn"), ("statistics", "bn#2"), ("gradients", "bn#2")]


def test_frozen_layers_are_not_exchanged() -> None:
    model, batches = small_network(), heterogeneous_batches([3, 2], (1, 4, 4))
    frozen = model[1]  # type: ignore[index]
    frozen.eval()
    frozen.running_mean += 0.3
    assert_centralized(model, batches)
    seen: list[Requests] = []
    gradients(model, batches, [3, 2], F.cross_entropy, observe=seen.append)
    assert {each.layer for each in seen} == {"4"}


def test_a_frozen_layer_without_running_statistics_still_uses_the_batch() -> None:
    model = small_network(track_running_stats=False)
    model[1].eval()  # type: ignore[index]
    assert_centralized(model, heterogeneous_batches([3, 2], (1, 4, 4)))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken layer")


def test_after_an_exception_the_model_is_as_it_was() -> None:
    model = small_network()
    model.append(Broken())  # type: ignore[operator]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="broken layer"), shared_statistics(model, alone):
        model(torch.randn(3, 1, 4, 4, dtype=torch.float64))
    assert all("forward" not in vars(layer) for layer in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_forward_that_sets_eval_mode_is_refused() -> None:
    model = held_in_passes(3, 1)
    with (
        pytest.raises(UnlikeBatchNormError, match="no BN layer normalized"),
        shared_statistics(model, alone),
    ):
        model(torch.randn(3, 1, 4, 4))


class Branches(nn.Sequential):
    """Takes the second branch only if it is asked to."""

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self[0](inputs))


def test_a_pass_that_leaves_the_layers_out_that_learn_is_none_in_eval_mode() -> None:
    model = Branches(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[0].eval()
    with shared_statistics(model, alone):
        model(torch.randn(3, 2))


def test_what_stood_in_for_forward_before_does_so_again() -> None:
    layer = nn.BatchNorm1d(2)
    layer.__dict__["forward"] = before = lambda x: x
    with shared_statistics(layer, alone):
        assert layer.forward is not before
    assert layer.forward is before


def test_hooks_run() -> None:
    model, seen = nn.Sequential(nn.BatchNorm1d(2)), []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    with shared_statistics(model, alone):
        output = model(torch.randn(3, 2))
    assert seen[0] is output


class ByData(nn.Module):
    """The order of its layers depends on the mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.first, self.second) if x.mean() < 0.5 else (self.second, self.first)
        return self.last(layers[1](layers[0](x).tanh()))  # type: ignore[no-any-return]


def test_another_order_of_layers_is_an_error() -> None:
    batches = heterogeneous_batches([4, 4, 4], (5,))
    batches[1] = batches[0]
    with pytest.raises(
        OrderError, match=r"client 2: is at .*second.* others are at .*first"
    ) as error:
        gradients(made(ByData), batches, [1, 1, 1], F.cross_entropy)
    assert error.value.client == 2


class ByDataShort(ByData):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) if x.mean() < 0.5 else x)  # type: ignore[no-any-return]


def test_a_client_with_fewer_layers_is_an_error() -> None:
    with pytest.raises(OrderError, match="client 1: is at its end"):
        gradients(made(ByDataShort), heterogeneous_batches([4, 4], (5,)), [1, 1], F.cross_entropy)


def test_the_gradient_of_the_gradient_is_refused() -> None:
    layer, x = nn.BatchNorm1d(2), torch.randn(3, 2, requires_grad=True)
    with shared_statistics(layer, alone):
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("affine", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_have_statistics_in_float32(affine: torch.dtype) -> None:
    def exchange(request: Requests) -> Answer:
        assert request.tensor.dtype == torch.float32
        return alone(request)

    layer = nn.BatchNorm1d(3).to(affine)
    x = torch.randn(8, 3).bfloat16().requires_grad_()
    plain = F.batch_norm(x.float(), None, None, training=True)
    with shared_statistics(layer, exchange):
        y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad is not None and x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(y.float(), plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("inputs_at", "weight_at", "bias_at"),
    [(0, 0, 0), (1, 0, 0), (2, 1, 0), (0, None, 0), (3, 1, None), (1, None, None)],
)
def test_stacked_along_any_axis_is_one_client_after_another(
    inputs_at: int, weight_at: int | None, bias_at: int | None
) -> None:
    torch.manual_seed(0)
    inputs, (weight, bias) = (
        torch.randn(3, 5, 2, 4, dtype=torch.float64),
        torch.rand(2, 3, 2, dtype=torch.float64),
    )
    weights = weight if weight_at is not None else weight[:1].expand(3, 2)
    biases = bias if bias_at is not None else bias[:1].expand(3, 2)

    def layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        apply: Apply = SharedBatchNorm.apply
        return apply(inputs, weight, bias, 1e-3, Use("layer", alone, "fused", final=False))

    each = [layer(*values) for values in zip(inputs, weights, biases, strict=True)]
    values = (
        inputs.movedim(0, inputs_at),
        weight[0] if weight_at is None else weight.movedim(0, weight_at),
        bias[0] if bias_at is None else bias.movedim(0, bias_at),
    )
    places: Any = (0, 0, 0, None)
    outputs, mean, variance, count = vmap(layer, (inputs_at, weight_at, bias_at), places)(*values)
    for found, wanted in zip(
        (outputs, mean, variance), zip(*(one[:3] for one in each), strict=True), strict=True
    ):
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-12, atol=1e-12)
    assert count == 5 * 4


def test_stacked_clients_of_a_layer_without_weights() -> None:
    inputs = torch.randn(3, 5, 2, dtype=torch.float64)

    def layer(inputs: Tensor) -> Tensor:
        apply: Apply = SharedBatchNorm.apply
        return apply(inputs, None, None, 1e-3, Use("layer", alone, "fused", final=False))[0]

    for found, own in zip(vmap(layer)(inputs), inputs, strict=True):
        torch.testing.assert_close(
            found, F.batch_norm(own, None, None, training=True, eps=1e-3), rtol=1e-12, atol=0
        )


def test_nobody_learns_from_the_statistics_themselves() -> None:
    apply: Apply = SharedBatchNorm.apply
    inputs = torch.randn(3, 2, requires_grad=True)
    found = apply(
        inputs, torch.ones(2, requires_grad=True), None, 1e-3, Use("layer", alone, "fused")
    )
    assert [each.requires_grad for each in found] == [True, False, False, False]


def test_stacked_clients_without_data_of_their_own_are_refused() -> None:
    def layer(weight: Tensor) -> Tensor:
        apply: Apply = SharedBatchNorm.apply
        return apply(torch.ones(4, 2), weight, None, 1e-3, Use("first", alone, "fused"))[0]

    with pytest.raises(
        RuntimeError, match="what clients say of BN layer 'first' does not depend on their data"
    ):
        vmap(layer)(torch.ones(3, 2))


CONVOLUTIONS: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@st.composite
def small_models(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Up to three blocks of a layer for inputs of any dimension, BN with any options, and a smooth
    activation.
    """
    dimensions, width = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    layers: list[Callable[[], nn.Module]] = []
    for _ in range(draw(st.integers(1, 3))):
        options: dict[str, Any] = {
            "affine": draw(st.booleans()),
            "momentum": draw(st.sampled_from([None, 0.1, 1.0])),
            "eps": draw(st.sampled_from([1e-5, 1e-2])),
        }
        sizes = (width, width, 1) if dimensions else (width, width)
        layers += [
            partial(CONVOLUTIONS[dimensions], *sizes),
            partial(NORMS[dimensions], width, **options),
            nn.Tanh,
        ]
    layers += [nn.Flatten, partial(nn.Linear, width * 2**dimensions, 10)]
    model = made(lambda: nn.Sequential(*[make() for make in layers]))
    return model, (width, *[2] * dimensions)


@settings(max_examples=40, deadline=None)
@given(
    small_models(),
    st.lists(st.tuples(st.integers(1, 4), st.floats(0.05, 1)), min_size=2, max_size=4),
    st.sampled_from(("paper", "fused")),
)
def test_any_network_batch_sizes_and_weights(
    network: tuple[nn.Module, tuple[int, ...]], clients: list[tuple[int, float]], exchange: Mode
) -> None:
    model, shape = network
    sizes = [size for size, _ in clients]
    weights = [weight / sum(weight for _, weight in clients) for _, weight in clients]
    batches, slow = heterogeneous_batches(sizes, shape), copy.deepcopy(model)
    # a second time, for running statistics that are means of all steps
    for _ in range(2):
        wanted = weighted_gradients(slow, batches, weights)
        found = gradients(model, batches, weights, F.cross_entropy, exchange)
        assert relative_error(mean_gradient(found, weights), wanted) < 1e-10
        assert largest_difference(model, slow) < 1e-10


def test_a_parameter_that_the_loss_does_not_depend_on_has_gradients_of_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_parameter("unused", nn.Parameter(torch.ones(4)))
    batches = [(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)) for _ in range(2)]
    for found in gradients(model, batches, [1, 1], nn.functional.cross_entropy):
        assert found["unused"].tolist() == [0.0] * 4
