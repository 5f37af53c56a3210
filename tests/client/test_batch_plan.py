"""Which samples a local step uses."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.client.batch_plan import BatchLoader, batch_sizes, draw_batches
from fedbn_flwr.data import Data, Split
from fedbn_flwr.wire import Instruction

counts, sizes, seeds = st.integers(1, 40), st.integers(1, 12), st.integers(0, 9)


def planned(
    count: int, merge_single: bool = False, seed: int = 0, **options: Any
) -> list[list[int]]:
    instruction = Instruction(**options)
    sizes = batch_sizes(count, instruction, merge_single)
    drawn = draw_batches(count, sizes, instruction.replacement, torch.Generator().manual_seed(seed))
    return [batch.tolist() for batch in drawn.split(sizes)]


def lengths(batches: list[list[int]]) -> list[int]:
    return [len(batch) for batch in batches]


def joined(batches: list[list[int]]) -> list[int]:
    return [position for batch in batches for position in batch]


@pytest.mark.parametrize(
    ("count", "options", "wanted"),
    [
        (20, {"batch_size": 20, "local_epochs": 3}, [20, 20, 20]),
        # into the next epoch
        (5, {"batch_size": 2, "local_steps": 7}, [2, 2, 1, 2, 2, 1, 2]),
        # steps count where both are given
        (10, {"batch_size": 5, "local_steps": 3, "local_epochs": 4}, [5, 5, 5]),
        (7, {"batch_size": 3}, [3, 3, 1]),
        (7, {"batch_size": 3, "merge_single": True}, [3, 4]),
        (8, {"batch_size": 3, "merge_single": True}, [3, 3, 2]),
        (5, {"batch_size": 2, "local_steps": 4, "merge_single": True}, [2, 3, 2, 3]),
        # batches of one that were asked for, and one sample that nothing is before
        (3, {"batch_size": 1, "merge_single": True}, [1, 1, 1]),
        (5, {"batch_size": 4, "merge_single": True}, [5]),
        (1, {"batch_size": 4, "local_steps": 2, "merge_single": True}, [1, 1]),
        # with replacement every batch is full, and an epoch has as many as without
        (
            3,
            {"batch_size": 8, "local_steps": 4, "merge_single": True, "replacement": True},
            [8, 8, 8, 8],
        ),
        (7, {"batch_size": 4, "local_epochs": 2, "replacement": True}, [4] * 4),
        (8, {"batch_size": 4, "local_epochs": 2, "replacement": True}, [4] * 4),
        (9, {"batch_size": 4, "local_epochs": 2, "replacement": True}, [4] * 6),
    ],
)
def test_lengths_of_batches(count: int, options: dict[str, Any], wanted: list[int]) -> None:
    assert lengths(planned(count, **options)) == wanted


def test_every_epoch_has_an_order_of_its_own_and_every_batch_with_replacement_is_drawn_anew() -> (
    None
):
    assert all(one != other for one, other in pairwise(planned(20, batch_size=20, local_epochs=3)))
    batches = planned(3, batch_size=8, local_steps=4, replacement=True)
    assert len({tuple(batch) for batch in batches}) == 4
    assert set(joined(batches)) == {0, 1, 2}


@pytest.mark.parametrize(
    "option", [{"batch_size": 0}, {"local_epochs": 0}, {"local_steps": -1, "local_epochs": 0}]
)
def test_training_nothing_is_no_training(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        planned(5, **option)


@given(counts, sizes, st.integers(1, 4), seeds, st.booleans())
def test_epochs_are_permutations_in_batches(
    count: int, size: int, epochs: int, seed: int, merge: bool
) -> None:
    batches = planned(count, batch_size=size, local_epochs=epochs, seed=seed, merge_single=merge)
    drawn = joined(batches)
    assert [sorted(drawn[start : start + count]) for start in range(0, len(drawn), count)] == [
        [*range(count)]
    ] * epochs
    if merge and size > 1 and count > 1:
        assert min(lengths(batches)) > 1
    assert max(lengths(batches)) <= size + (1 if merge and size > 1 else 0)


@given(counts, sizes, st.integers(1, 30), seeds, st.booleans(), st.booleans())
def test_fewer_steps_are_the_first_of_more(
    count: int, size: int, steps: int, seed: int, merge: bool, replacement: bool
) -> None:
    longer = planned(
        count,
        batch_size=size,
        local_steps=steps + 3,
        seed=seed,
        merge_single=merge,
        replacement=replacement,
    )
    shorter = planned(
        count,
        batch_size=size,
        local_steps=steps,
        seed=seed,
        merge_single=merge,
        replacement=replacement,
    )
    assert len(shorter) == steps
    assert shorter == longer[:steps]


def test_a_border_has_a_value_of_the_normalized_data() -> None:
    """White images with a black border: what a loader gives has the two values of white and black,
    normalized.
    """
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    split = Split(images, torch.zeros(2, dtype=torch.int64))
    split = Data("black and white", split, split, 1).standardized().train
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    loader = BatchLoader(
        split, cpu, "crop:padding=4:fill=0", torch.ones(6, dtype=torch.int64), [3, 3], generator
    )
    inputs = torch.cat([batch for batch, _ in loader])
    # mean and standard deviation of the data are 1/2
    assert set(inputs.flatten().tolist()) == {
        -1.0,
        1.0,
    }
