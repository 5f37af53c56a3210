"""Gathered statistics are those of the concatenated inputs, and gathering leaves no trace; so do
adapted models.
"""

import warnings
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.norm import Moments, adapt, bn_layers, freeze, gather_moments, pool_moments, replace


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model(kind: str = "bn") -> nn.Module:
    torch_default = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(), nn.Flatten()]
    model = nn.Sequential(*torch_default, nn.Linear(12, 4), nn.BatchNorm1d(4)).double()
    return replace(model, kind)


def assert_moments_of(moments: Moments, rows: Tensor) -> None:
    assert moments.count == len(rows)
    torch.testing.assert_close(moments.mean, rows.mean(dim=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        moments.variance, rows.var(dim=0, correction=0), rtol=1e-12, atol=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.floats(-1e3, 1e3),
)
def test_pooled_moments_are_those_of_the_concatenated_inputs(
    clients: list[list[int]], offset: float
) -> None:
    seed = iter(range(100))
    batches = [
        [normal(size + 1, 3, 2, seed=next(seed)) * 2 + offset for size in sizes]
        for sizes in clients
    ]
    layer = nn.BatchNorm1d(3).double()
    pooled = pool_moments(gather_moments(layer, client) for client in batches)
    everything = torch.cat(
        [batch.transpose(1, 2).reshape(-1, 3) for client in batches for batch in client]
    )
    assert_moments_of(pooled[""], everything)


@pytest.mark.parametrize("kind", ["bn", "brn", "hbn", "static-bn"])
def test_gathering_leaves_no_trace(kind: str) -> None:
    model = make_model(kind)
    model.get_submodule("6").eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with freeze(model.get_submodule("1")):
        modes = [layer.training for layer in model.modules()]
        gather_moments(model, [normal(4, 2, 4, 4)])
        assert [layer.training for layer in model.modules()] == modes
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.get_submodule("1").training  # gathering was no request for another mode


def test_gathering_leaves_no_trace_of_a_failure_either() -> None:
    model = make_model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError):
        gather_moments(model, [normal(4, 2, 4, 4), normal(4, 1, 4, 4)])
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(layer.training and not layer._forward_pre_hooks for layer in model.modules())


def test_a_layer_used_twice_pools_both_uses() -> None:
    layer = nn.BatchNorm1d(3, affine=False).double()
    batch = normal(5, 3) + 4
    seen = gather_moments(nn.Sequential(layer, layer), [batch])
    normalized = nn.functional.batch_norm(batch, None, None, training=True)
    assert list(seen) == ["0"]
    assert_moments_of(seen["0"], torch.cat([batch, normalized]))


def test_two_values_are_corrected_as_torch_does() -> None:
    assert Moments(2, torch.zeros(1), torch.tensor([3.0])).running_variance(
        unbiased=True
    ).tolist() == [6.0]
    assert Moments(1, torch.zeros(1), torch.tensor([0.0])).running_variance(
        unbiased=True
    ).tolist() == [0.0]


# ---- adapting ------------------------------------------------------------------------------------


def trained_model() -> nn.Module:
    """Return a model whose BN has statistics, and whose layers differ by an order from that of the
    forward pass.
    """
    model = make_model()
    model(normal(40, 2, 4, 4, seed=7) * 3 - 1)
    return model


def in_one_pass(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a copy after one forward pass in training mode over all inputs, whose statistics
    replace the old ones.
    """
    model = deepcopy(model)
    for layer in model.modules():
        layer.train(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d))
    for layer in bn_layers(model).values():
        layer.momentum = 1.0
    model(inputs)
    return model


@pytest.mark.parametrize("sizes", [[60], [20, 20, 20], [3, 1, 40, 16], [1] * 60])
def test_adapted_statistics_are_those_of_all_inputs_in_one_pass(sizes: list[int]) -> None:
    model, inputs = trained_model(), normal(60, 2, 4, 4) * 2 + 5
    expected, state = (
        in_one_pass(model, inputs).state_dict(),
        adapt(model, inputs.split(sizes)).state_dict(),
    )
    assert state.keys() == expected.keys()
    for name in ("1.running_mean", "1.running_var", "6.running_mean", "6.running_var"):
        torch.testing.assert_close(state[name], expected[name], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(state[name], model.state_dict()[name], rtol=0.01)


def test_batches_may_be_dictionaries_as_loaders_of_hugging_face_give_them() -> None:
    model, inputs = trained_model(), normal(60, 2, 4, 4)
    labels = torch.zeros(30, dtype=torch.int64)
    batches = [{"name": ["a"] * 30, "label": labels, "image": batch} for batch in inputs.split(30)]
    torch.testing.assert_close(
        adapt(model, batches).state_dict(), adapt(model, inputs.split(30)).state_dict()
    )


@pytest.mark.parametrize("sizes", [[60], [30, 30]])
def test_one_batch_goes_through_the_model_once(sizes: list[int]) -> None:
    model, counted = trained_model(), list[int]()
    model.register_forward_hook(lambda *_: counted.append(1))
    adapt(model, normal(60, 2, 4, 4).split(sizes))
    # two batches, each of them for each layer
    assert len(counted) == (1 if sizes == [60] else 2 * len(bn_layers(model)))


def test_adapting_moves_nothing_else() -> None:
    model = trained_model()
    model.get_submodule("6").eval()
    before, drawn = deepcopy(model.state_dict()), torch.get_rng_state()
    loader = DataLoader(
        TensorDataset(normal(60, 2, 4, 4), torch.zeros(60)), batch_size=25, shuffle=True
    )
    adapted = adapt(model, loader)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [layer.training for layer in adapted.modules()] == [
        layer.training for layer in model.modules()
    ]
    moved = [
        name for name, value in adapted.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert moved == ["1.running_mean", "1.running_var", "6.running_mean", "6.running_var"]
    assert all(
        one is not other
        for one, other in zip(adapted.parameters(), model.parameters(), strict=True)
    )
    assert [one.requires_grad for one in adapted.parameters()] == [
        one.requires_grad for one in model.parameters()
    ]


def test_a_model_that_does_not_learn_is_adapted_too() -> None:
    model, inputs = trained_model(), normal(60, 2, 4, 4)
    adapted = adapt(model, inputs)
    torch.testing.assert_close(
        adapt(model.requires_grad_(False), inputs).state_dict(),
        adapted.state_dict(),
        rtol=0,
        atol=0,
    )


def test_a_weight_is_between_the_models_statistics_and_the_new_ones() -> None:
    """By hand: twenty values 1 and twenty 3 have the mean 2 and the unbiased variance 40 / 39.

    A quarter of that.
    """
    layer, inputs = (
        nn.BatchNorm1d(1).double(),
        torch.tensor([[1.0], [3.0]], dtype=torch.float64).repeat(20, 1),
    )
    adapted = adapt(layer, inputs, weight=0.25)
    assert adapted.state_dict()["running_mean"].item() == pytest.approx(0.25 * 2)
    assert adapted.state_dict()["running_var"].item() == pytest.approx(0.75 * 1 + 0.25 * 40 / 39)


def test_upper_layers_see_what_mixed_statistics_below_make() -> None:
    model, inputs, share = trained_model(), normal(60, 2, 4, 4) * 2 + 5, 0.3
    state, old = adapt(model, inputs, share).state_dict(), model.state_dict()
    below, first, *_, upper, _ = model.children()
    assert isinstance(first, nn.BatchNorm2d)
    hidden = below(inputs).detach()
    variance, mean = torch.var_mean(hidden, dim=(0, 2, 3), correction=0)
    mixed = (
        (1 - share) * old["1.running_mean"] + share * mean,
        (1 - share) * old["1.running_var"] + share * variance,
    )
    hidden = nn.functional.batch_norm(hidden, *mixed, first.weight, first.bias, eps=1e-5)
    seen = upper(hidden.relu().flatten(1)).detach()
    expected = (1 - share) * old["6.running_mean"] + share * seen.mean(0)
    torch.testing.assert_close(state["6.running_mean"], expected, rtol=1e-12, atol=1e-12)


def test_inputs_without_statistics_are_refused() -> None:
    inputs = normal(30, 2, 4, 4)
    inputs[3, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^adapt: the inputs are not finite$"):
        adapt(make_model(), inputs)
    with (
        pytest.warns(UserWarning, match="1 inputs are noisy"),
        pytest.raises(ValueError, match="BN layer '0' sees one value per channel"),
    ):
        adapt(nn.Sequential(nn.BatchNorm1d(2)), torch.zeros(1, 2))


def test_a_model_that_diverges_is_adapted() -> None:
    layer = nn.BatchNorm1d(2)
    layer.weight.data.fill_(torch.inf)
    model = nn.Sequential(layer, nn.BatchNorm1d(2))
    assert adapt(model, torch.rand(30, 2)).state_dict()["1.running_mean"].isnan().all()


def test_what_cannot_be_adapted_is_said_in_one_line() -> None:
    inputs = normal(30, 2, 4, 4)
    for kind in ("ln", "none"):
        with pytest.raises(
            ValueError,
            match=r"^adapt re-estimates BN's running statistics: the model has no BN layer$",
        ):
            adapt(make_model(kind), inputs)
    with pytest.raises(ValueError, match=r"^adapt: weight must be above 0 and at most 1, got 0$"):
        adapt(make_model(), inputs, weight=0)
    with pytest.raises(ValueError, match=r"^adapt: there are no inputs$"):
        adapt(make_model(), [])
    able = "a tensor, a pair that begins with one, or a dictionary with one"
    with pytest.raises(ValueError, match=rf"^adapt: a batch must be {able}, got dict$"):
        adapt(make_model(), [{"label": torch.zeros(30)}])


def test_few_inputs_are_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"^adapt: statistics of 19 inputs are noisy: give 20 or more$"
    ):
        adapt(make_model(), normal(19, 2, 4, 4).split(10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt(make_model(), normal(20, 2, 4, 4).split(10))


def test_a_layer_that_no_input_comes_to_keeps_its_statistics() -> None:
    model = trained_model()
    model.add_module("aside", nn.ModuleList([nn.BatchNorm1d(3).double()]))
    model.forward = lambda inputs: nn.Sequential(*[*model.children()][:-1])(inputs)
    state = adapt(model, normal(30, 2, 4, 4)).state_dict()
    assert state["aside.0.running_var"].tolist() == [1, 1, 1]
