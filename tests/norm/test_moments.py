"""Gathered statistics are those of the concatenated inputs, and gathering leaves no trace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedbn_flwr.norm import Moments, bn_layers, freeze, gather, gathering, pool, replace


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model(kind: str = "bn") -> nn.Module:
    torch_default = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(), nn.Flatten()]
    model = nn.Sequential(*torch_default, nn.Linear(12, 4), nn.BatchNorm1d(4)).double()
    return replace(model, kind)


def assert_moments_of(moments: Moments, rows: Tensor) -> None:
    assert moments.count == len(rows)
    torch.testing.assert_close(moments.mean, rows.mean(dim=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.variance, rows.var(dim=0, correction=0), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4), st.floats(-1e3, 1e3))
def test_pooled_moments_are_those_of_the_concatenated_inputs(clients: list[list[int]], offset: float) -> None:
    seed = iter(range(100))
    batches = [[normal(size + 1, 3, 2, seed=next(seed)) * 2 + offset for size in sizes] for sizes in clients]
    layer = nn.BatchNorm1d(3).double()
    pooled = pool(gather(layer, client) for client in batches)
    everything = torch.cat([batch.transpose(1, 2).reshape(-1, 3) for client in batches for batch in client])
    assert_moments_of(pooled[""], everything)


def test_every_layer_is_recorded_with_what_it_was_given() -> None:
    model = make_model()
    batches = [normal(4, 2, 4, 4, seed=seed) for seed in range(3)]
    seen = gather(model, batches)
    assert list(seen) == list(bn_layers(model)) == ["1", "6"]
    first = torch.cat([model.get_submodule("0")(batch) for batch in batches]).detach()
    assert_moments_of(seen["1"], first.transpose(0, 1).reshape(3, -1).T)
    # The second layer's inputs went through the first's mini-batch normalization, without dropout.
    hidden = []
    for batch in batches:
        for layer in model.children():
            if isinstance(layer, nn.BatchNorm1d):
                hidden.append(batch.detach())
            batch = layer.train(not isinstance(layer, nn.Dropout))(batch)
    assert_moments_of(seen["6"], torch.cat(hidden))


@pytest.mark.parametrize("kind", ["bn", "brn", "hbn", "static-bn"])
def test_gathering_leaves_no_trace(kind: str) -> None:
    model = make_model(kind)
    model.get_submodule("6").eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with freeze(model.get_submodule("1")):
        modes = [layer.training for layer in model.modules()]
        gather(model, [normal(4, 2, 4, 4)])
        assert [layer.training for layer in model.modules()] == modes
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.get_submodule("1").training  # gathering was no request for another mode


def test_gathering_leaves_no_trace_of_a_failure_either() -> None:
    model = make_model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError):
        gather(model, [normal(4, 2, 4, 4), normal(4, 1, 4, 4)])
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(layer.training and not layer._forward_pre_hooks for layer in model.modules())


def test_a_layer_used_twice_pools_both_uses() -> None:
    layer = nn.BatchNorm1d(3, affine=False).double()
    batch = normal(5, 3) + 4
    seen = gather(nn.Sequential(layer, layer), [batch])
    normalized = nn.functional.batch_norm(batch, None, None, training=True)
    assert list(seen) == ["0"]
    assert_moments_of(seen["0"], torch.cat([batch, normalized]))


def test_two_values_are_corrected_as_torch_does() -> None:
    assert Moments(2, torch.zeros(1), torch.tensor([3.0])).running_variance(unbiased=True).tolist() == [6.0]
    assert Moments(1, torch.zeros(1), torch.tensor([0.0])).running_variance(unbiased=True).tolist() == [0.0]


def test_whoever_runs_the_model_may_ask_for_another_mode_meanwhile() -> None:
    model, batches = (
        nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2)).double(),
        [normal(4, 2, 4, 4), normal(3, 2, 4, 4)],
    )
    with torch.no_grad(), gathering(model) as seen:
        for batch in batches:
            model.eval()(batch)
    wanted = gather(model, batches)
    assert all(torch.equal(seen[name].variance, wanted[name].variance) for name in ("0", "1"))
