"""Sums of states, against the same in numpy, state by state."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbn_flwr.state.sums import Sums

DRAWN = torch.Generator().manual_seed(0)
#: an odd number of 4 bytes before numbers of 8, and of 2 bytes
ENTRIES = {
    "odd": torch.randn(3, 5, generator=DRAWN),
    "counter": torch.tensor([4, 2, 9]),
    "wide": torch.randn(3, 2, 2, dtype=torch.float64, generator=DRAWN),
    "half": torch.randn(3, 3, generator=DRAWN).half(),
    "none": torch.zeros(3, 0),
}
WEIGHTS = (7.0, 1.0, 20.0)


def rows(*numbers: int) -> dict[str, Tensor]:
    return {name: value[list(numbers)] for name, value in ENTRIES.items()}


def test_the_mean_is_that_of_all_that_was_added_in_the_dtypes_of_the_states() -> None:
    sums = Sums(rows(0, 1), WEIGHTS[:2])
    sums.add(Sums(rows(2), WEIGHTS[2:]))
    mean = sums.mean(sum(WEIGHTS))
    assert list(mean) == list(ENTRIES)
    for name, value in mean.items():
        given = ENTRIES[name]
        assert (value.dtype, value.shape) == (given.dtype, given.shape[1:])
        assert value.data_ptr() % value.itemsize == 0
        if name == "counter":
            assert value.item() == 9
            continue
        first, second, third = given.double().numpy()
        total = (WEIGHTS[0] * first + WEIGHTS[1] * second) + WEIGHTS[2] * third
        wanted = torch.from_numpy(np.asarray(total / 28)).to(given.dtype)
        torch.testing.assert_close(value, wanted, rtol=1e-15 if name == "wide" else 0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 11.0, -11.0])
def test_one_number_that_is_none_or_too_large_is_a_bound(value: float) -> None:
    for name in ("odd", "wide"):
        spoiled = {**rows(0), name: ENTRIES[name][:1].clone()}
        assert all(abs(bound) <= 10 for bound in Sums(spoiled, (1.0,)).bounds())
        spoiled[name].view(-1)[-1] = value
        assert not all(abs(bound) <= 10 for bound in Sums(spoiled, (1.0,)).bounds())


def test_there_may_be_nothing_to_add() -> None:
    for entries in ({}, {"none": torch.zeros(2, 0)}):
        sums = Sums(entries, (1.0, 2.0))
        sums.add(Sums(entries, (3.0, 4.0)))
        assert sums.bounds() == []
        assert [*sums.mean(10)] == [*entries]
