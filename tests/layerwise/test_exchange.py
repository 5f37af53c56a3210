"""What the server makes of what the clients say."""

from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fedbn_flwr.layerwise import (
    Exchange,
    Kind,
    Requests,
    SuspendedStep,
    combine,
    respond,
    take_step,
)
from fedbn_flwr.layerwise.exchange import (
    LARGEST,
    ExchangeError,
    OrderError,
    Why,
    join_requests,
    pool_requests,
    why_unusable,
)
from fedbn_flwr.layerwise.steps import Lockstep


def request(*values: float, kind: Kind = "mean", layer: str = "bn", count: int = 4) -> Requests:
    return Requests.of_client(kind, layer, torch.tensor(values), count)


def statistics(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values.mean(), values.var(correction=0)]).unsqueeze(1)


def test_a_weighted_mean() -> None:
    # (1 * 1 + 3 * 3) / 4 = 2.5, and weights need not sum to one
    for kind in ("mean", "variance", "gradients"):
        assert combine(kind, torch.tensor([[1.0], [3.0]]), [1, 3]).tolist() == [2.5]


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=4))
def test_pooled_statistics_are_those_of_the_union(clients: list[list[float]]) -> None:
    values = [torch.tensor(client, dtype=torch.float64) for client in clients]
    weights = [len(client) for client in clients]
    rows = torch.stack([statistics(each) for each in values])
    pooled = combine("statistics", rows, weights)
    torch.testing.assert_close(pooled, statistics(torch.cat(values)), rtol=1e-9, atol=1e-9)
    backwards = combine("statistics", rows.flip(0), weights[::-1])
    torch.testing.assert_close(pooled, backwards, rtol=1e-14, atol=1e-14)


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(1e-6, 1), st.floats(0, 100)),
        min_size=2,
        max_size=8,
    ),
    st.integers(1, 7),
)
@example([(0.0, 1.0, 3.0), (8.0, 1.0, 1.0), (5.0, 1.0, 0.0)], 2)
def test_the_pool_of_pools_is_that_of_all_clients(
    clients: list[tuple[float, float, float]], cut: int
) -> None:
    """Also where means are a million times as large as standard deviations: sums of squares would
    lose the variance.
    """
    weights = [weight for _, _, weight in clients]
    assume(sum(weights) > 0)
    rows = torch.tensor(
        [[[mean], [variance]] for mean, variance, _ in clients], dtype=torch.float64
    )
    whole = Requests("statistics", "bn", rows, (4,) * len(clients))
    shares = [rows[:cut], rows[cut:]] if cut < len(clients) else [rows]
    parts = [Requests("statistics", "bn", share, (4,) * len(share)) for share in shares]
    pools = join_requests(
        [
            pool_requests(parts[0], weights[:cut]),
            *(pool_requests(part, weights[cut:]) for part in parts[1:]),
        ]
    )
    found, wanted = respond(pools, ()), respond(whole, weights)
    assert (pools.clients, found.count) == (whole.clients, wanted.count)
    torch.testing.assert_close(found.tensor, wanted.tensor, rtol=1e-12, atol=1e-12)


def test_only_weighted_sums_tell_weights_by_which_workers_can_pool() -> None:
    requests = join_requests([request(1.0), request(3.0), request(8.0)])
    assert respond(requests, [1, 1, 2]).weights == (1, 1, 2)
    answer = respond(requests, [1, 1, 2], lambda kind, rows, weights: rows.median(0).values)
    assert (answer.tensor.tolist(), answer.weights) == ([3.0], ())
    # in the dtype of the clients, and not in that of the pools
    pools = join_requests([pool_requests(requests, [1, 1, 2])] * 2)
    assert (pools.tensor.dtype, respond(pools, ()).tensor.dtype) == (torch.float64, torch.float32)


def test_the_dtype_is_the_clients_and_the_sum_is_exact() -> None:
    many = torch.tensor([[1e8], [1.0], [-1e8]])
    found = combine("mean", many, [1, 1, 1])
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1 / 3)  # 0 in float32


def test_a_constant_channel_a_single_value_and_a_weight_of_nothing_are_sound() -> None:
    """Negative means and fractions of a weight, too."""
    clients = [
        Requests.of_client("statistics", "bn", torch.tensor([[mean], [0.0]]), 1)
        for mean in (-1.0, -3.0, 5.0)
    ]
    answer = respond(join_requests(clients), [0.25, 0.25, 0])
    assert answer.tensor.tolist() == [[-2.0], [1.0]]
    assert answer.count == 3


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1, float("nan")], [float("inf"), 1]])
def test_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        respond(join_requests([request(1.0), request(2.0)]), weights)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (request(float("nan")), "the mean of BN layer 'bn' is not finite"),
        (request(float("inf")), "the mean of BN layer 'bn' is not finite"),
        (request(1e20), "the mean of BN layer 'bn' is too large to be pooled in float32"),
        (request(1.0, 2.0), r"is \(2,\) torch.float32, the others' is \(1,\)"),
        (
            Requests.of_client("mean", "bn", torch.ones(1, dtype=torch.float64), 4),
            "torch.float64, the others' is",
        ),
        (request(1.0, count=0), "is over 0 values"),
    ],
)
@pytest.mark.parametrize("weight", [0, 1])
def test_a_lying_client_is_named_whatever_its_weight(
    odd: Requests, message: str, weight: float
) -> None:
    with pytest.raises(ExchangeError, match=message) as error:
        respond(join_requests([request(1.0), odd, request(2.0)]), [1, weight, 1])
    assert error.value.client == 1


def test_numbers_whose_sum_is_not_finite_are_sound() -> None:
    largest = torch.finfo(torch.float32).max / 8
    many = [request(*[largest] * 9, kind="gradients")] * 2
    assert not many[0].tensor.sum().isfinite()
    assert respond(join_requests(many), [1, 1]).tensor.tolist() == [largest] * 9


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
#: how much of the square root of a dtype's largest number a mean may be, if its variance is 0
LIMIT = 8**-0.5
KINDS: tuple[Kind, ...] = ("mean", "variance", "statistics", "gradients")


def one_channel(kind: Kind, mean: float, variance: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a client's values of a kind; gradients are of the size of the variance."""
    values = {
        "mean": [mean],
        "variance": [variance],
        "statistics": [[mean], [variance]],
        "gradients": [[0], [-variance]],
    }
    return torch.tensor(values[kind], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_client_with_too_large_values_is_named(kind: Kind, dtype: torch.dtype) -> None:
    """It is named in every dtype, and for a large mean as for a large variance.

    A little less is sound.
    """
    largest = min(torch.finfo(dtype).max, LARGEST)
    for by_mean, by_variance in ((1.02, 0.0), (0.0, 1.04), (0.98, 0.0), (0.0, 0.96)):
        mean, variance = by_mean * LIMIT * largest**0.5, by_variance * (largest / 8)
        tensors = [one_channel(kind, small, small, dtype) for small in (0.0, 1.0, 2.0, 3.0)]
        tensors.insert(2, one_channel(kind, mean, variance, dtype))
        requests = [Requests.of_client(kind, "bn", tensor, 4) for tensor in tensors]
        is_used = {"mean": by_mean, "statistics": by_mean + by_variance}.get(kind, by_variance)
        if is_used > 1:
            with pytest.raises(ExchangeError, match="is too large to be pooled") as error:
                respond(join_requests(requests), [1] * 5)
            assert (error.value.client, error.value.why) == (2, Why.INFINITE)
            del requests[2]
        assert respond(join_requests(requests), [1] * len(requests)).tensor.isfinite().all()


@st.composite
def clients_statistics(draw: st.DrawFn) -> tuple[torch.Tensor, list[float]]:
    """Return means and variances of several clients in a dtype, some too large, and weights.

    One may be almost 1.
    """
    dtype, clients = draw(st.sampled_from(DTYPES)), draw(st.integers(2, 5))
    largest = min(torch.finfo(dtype).max, LARGEST)
    means = [
        draw(st.floats(-1, 1)) * largest ** draw(st.sampled_from([0, 0.5, 0.7]))
        for _ in range(clients)
    ]
    variances = [
        draw(st.floats(0, 1)) * largest ** draw(st.sampled_from([0, 0.5, 1]))
        for _ in range(clients)
    ]
    weights = draw(
        st.lists(st.sampled_from([1e-6, 1.0, 3.0, 1e6]), min_size=clients, max_size=clients)
    )
    return torch.tensor([means, variances], dtype=torch.float64).T.unsqueeze(-1).to(dtype), weights


@given(clients_statistics())
def test_whoever_is_refused_is_too_large_and_without_them_the_pool_is_finite(
    drawn: tuple[torch.Tensor, list[float]],
) -> None:
    stacked, weights = drawn
    largest = Fraction(min(torch.finfo(stacked.dtype).max, LARGEST))
    sound = [
        client for client, values in enumerate(stacked) if not why_unusable("statistics", values)
    ]
    for client in set(range(len(stacked))) - set(sound):
        mean, variance = (Fraction(value) for value in stacked[client].flatten().tolist())
        # times 8, and within the rounding of the dtype
        assert 8 * (mean**2 + variance) * Fraction(1.02) > largest
    assert bool(why_unusable("statistics", stacked)) == (len(sound) < len(stacked))
    if sound:
        pool = combine("statistics", stacked[sound], [weights[client] for client in sound])
        assert pool.isfinite().all()
        # as running statistics, and around a mean that came first
        assert (2 * pool[1]).isfinite().all()
        assert (1 - pool[0]).square().isfinite().all()


@pytest.mark.parametrize(
    ("kind", "tensor", "message"),
    [
        ("variance", torch.tensor([-1.0]), "has a negative variance"),
        ("statistics", torch.tensor([[1.0], [-1.0]]), "has a negative variance"),
        ("mean", torch.ones(1, dtype=torch.int64), r"is torch\.int64, no floating-point numbers"),
    ],
)
def test_what_is_no_statistic_is_refused(kind: Kind, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ExchangeError, match=rf"client 0: .* {message}") as error:
        respond(Requests.of_client(kind, "bn", tensor, 4), [1])
    assert error.value.why is Why.OTHER


@pytest.mark.parametrize("odd", [request(1.0, layer="other"), request(1.0, kind="variance")])
def test_a_client_at_another_layer_is_named(odd: Requests) -> None:
    with pytest.raises(
        OrderError, match=r"is at the .* where the others are at the mean of BN layer 'bn'"
    ) as error:
        join_requests([odd, request(1.0), request(1.0)])
    assert error.value.client == 0


def test_parts_of_several_clients_are_joined_in_any_order() -> None:
    whole = Requests("mean", "bn", torch.arange(5.0).unsqueeze(1), (1, 2, 3, 4, 5))
    parts = [
        Requests("mean", "bn", whole.tensor[rows], tuple(row + 1 for row in rows))
        for rows in ([3, 0], [4, 1, 2])
    ]
    joined = join_requests(parts, order=[1, 3, 4, 0, 2])
    assert torch.equal(joined.tensor, whole.tensor)
    assert joined.counts == whole.counts
    assert join_requests([whole]) is join_requests([whole], order=range(5)) is whole
    with pytest.raises(ValueError, match="requests of 5 clients where 4 are expected"):
        join_requests(parts, order=range(4))
    with pytest.raises(OrderError) as error:
        join_requests([request(1.0), request(1.0), request(1.0, layer="other")], order=[2, 0, 1])
    assert error.value.client == 0
    # most clients are right, and not most rows
    two = pool_requests(join_requests([request(0.0)] * 2), [1, 1])
    with pytest.raises(
        OrderError, match="'other' where the others are at the mean of BN layer 'bn'"
    ) as error:
        join_requests([pool_requests(request(0.0, layer="other"), [1]), two], order=[1, 0])
    assert error.value.client == 1


def test_where_nothing_is_asked_nobody_is_weighed() -> None:
    """Participants, from whom weights are made, are known when the first requests are."""

    def replies(names: str, _: Exchange) -> list[str]:
        return list(names)

    stacks = [SuspendedStep(partial(replies, names), 0) for names in ("ca", "b")]
    assert take_step(Lockstep(stacks, order=[1, 2, 0]), lambda: pytest.fail("weighed")) == [
        "a",
        "b",
        "c",
    ]
