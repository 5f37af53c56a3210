"""A split gives normalized batches, and data can be resized, measured and divided."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.data import Data, Split, leave_out
from fedbn_flwr.data.pixels import deviations
from fedbn_flwr.data.splits import stratified


def make_data(count: int = 40, domains: bool = True) -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (count, 3, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 4
    split = Split(inputs, labels, torch.arange(count) // 4 % 2 if domains else None)
    return Data("made", split, split, 4, ("first", "second") if domains else ())


def test_batch_scales_bytes_and_normalizes() -> None:
    inputs = torch.tensor([0, 51, 102, 255], dtype=torch.uint8).reshape(2, 2, 1, 1)
    split = Split(inputs, torch.tensor([5, 6]), mean=(0.1, 0.2), std=(0.5, 0.25))
    batch, labels = split.batch(torch.tensor([1, 0, 1]))
    # the second sample: (102 / 255 - 0.1) / 0.5 = 0.6 and (255 / 255 - 0.2) / 0.25 = 3.2
    # the first sample: (0 / 255 - 0.1) / 0.5 = -0.2 and (51 / 255 - 0.2) / 0.25 = 0
    expected = torch.tensor([[0.6, 3.2], [-0.2, 0.0], [0.6, 3.2]])
    torch.testing.assert_close(batch.flatten(1), expected)
    assert labels.tolist() == [6, 5, 6]


def test_batch_of_floats_is_a_copy_and_is_not_scaled() -> None:
    inputs = torch.rand(3, 1, 2, 2)
    before = inputs.clone()
    batch, _ = Split(inputs, torch.zeros(3, dtype=torch.int64), mean=(0.5,), std=(2.0,)).batch(
        torch.arange(3)
    )
    torch.testing.assert_close(batch, (before - 0.5) / 2)
    assert torch.equal(inputs, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batch_on_a_gpu_equals_the_batch_on_the_cpu() -> None:
    split, indices = make_data().standardized().train, torch.tensor([3, 1, 2])
    expected = split.batch(indices)
    for held in (split, replace(split, inputs=split.inputs.cuda(), labels=split.labels.cuda())):
        inputs, labels = held.batch(indices, "cuda")
        assert inputs.is_cuda
        assert labels.is_cuda
        torch.testing.assert_close(inputs.cpu(), expected[0])
        torch.testing.assert_close(labels.cpu(), expected[1])


def test_standardized_batches_have_mean_zero_and_deviation_one_per_channel() -> None:
    for data in (make_data(), make_data_of_floats()):
        batch, _ = data.standardized().train.batch(torch.arange(len(data.train)))
        variance, mean = torch.var_mean(batch.double(), dim=(0, 2, 3), correction=0)
        torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-6, rtol=0)
        torch.testing.assert_close(variance, torch.ones_like(variance), atol=1e-5, rtol=0)


def make_data_of_floats() -> Data:
    split = Split(
        torch.rand(30, 2, 4, 4, generator=torch.Generator().manual_seed(1)) * 3,
        torch.arange(30) % 3,
    )
    return Data("floats", split, split, 3)


def test_both_splits_use_the_moments_of_training() -> None:
    train, test = make_data().train, make_data(20).train
    data = Data(
        "mixed", Split(train.inputs, train.labels), Split(255 - test.inputs, test.labels), 4
    ).standardized()
    assert data.test.mean == data.train.mean
    assert data.test.std == data.train.std


def test_a_constant_channel_does_not_divide_by_zero() -> None:
    for inputs in (torch.full((4, 1, 2, 2), 7, dtype=torch.uint8), torch.full((4, 1, 2, 2), 7.0)):
        split = Split(inputs, torch.zeros(4, dtype=torch.int64))
        batch, _ = Data("flat", split, split, 1).standardized().train.batch(torch.arange(4))
        torch.testing.assert_close(batch, torch.zeros(4, 1, 2, 2))


def test_resized_changes_the_size_and_keeps_flat_images_and_the_type() -> None:
    split = Split(
        torch.full((2, 3, 8, 8), 100, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    )
    for side in (4, 20):
        data = Data("flat", split, split, 1).resized(side)
        assert data.image_size == side
        assert data.in_channels == 3
        assert torch.equal(
            data.train.inputs, torch.full((2, 3, side, side), 100, dtype=torch.uint8)
        )


def test_validation_split_is_stratified_by_class_and_domain() -> None:
    data = make_data(count=80)  # ten samples of each of 4 classes x 2 domains
    divided = data.validation_split(0.2, seed=3)
    assert (len(divided.train), len(divided.test)) == (64, 16)
    for split, of_each in ((divided.train, 8), (divided.test, 2)):
        assert split.domains is not None
        assert torch.bincount(split.labels * 2 + split.domains).tolist() == [of_each] * 8


def test_validation_split_loses_no_sample_and_is_a_function_of_the_seed() -> None:
    count = 41
    numbered = torch.arange(count, dtype=torch.float32).reshape(count, 1, 1, 1)
    split = Split(numbered, torch.arange(count) % 3)
    first, second, again = (
        Data("n", split, split, 3).validation_split(0.25, seed) for seed in (0, 1, 0)
    )
    together = torch.cat([first.train.inputs, first.test.inputs]).flatten().sort().values
    assert torch.equal(together, numbered.flatten())
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert first.validation_split(0.5, 0) is first.validation_split(0.5, 0)
    assert not torch.equal(first.test.inputs, second.test.inputs)


def test_a_domain_left_out_is_tested_and_not_trained_with() -> None:
    data = make_data().standardized()
    domains = data.train.domains
    assert domains is not None
    left, unlabeled = leave_out(data, "second")
    assert torch.equal(left.train.inputs, data.train.inputs[domains == 0])
    assert torch.equal(left.test.inputs, data.test.inputs[domains == 1])
    assert torch.equal(unlabeled.inputs, data.train.inputs[domains == 1])
    assert leave_out(data, "second")[0] is left
    # nothing of the other domain is in what inputs are normalized by, unless the data bring that
    mean, variance = left.train.moments()
    assert left.test.mean == mean != data.train.mean
    assert left.test.std == deviations(variance) != data.train.std
    own = replace(
        data, train=replace(data.train, mean=(0.5,) * 3), test=replace(data.test, mean=(0.5,) * 3)
    )
    assert leave_out(own, "first")[0].train.mean == (0.5,) * 3


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2.0, 0.001])
def test_validation_split_of_nothing_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="leaves one side empty"):
        make_data().validation_split(fraction, 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_stratified_takes_every_stratum_its_share(strata: list[int], draw: st.DataObject) -> None:
    count = draw.draw(st.integers(0, len(strata)))
    chosen = stratified(np.array(strata), count, np.random.default_rng(0))
    assert len(chosen) == len(set(chosen.tolist())) == count
    for stratum in set(strata):
        share = strata.count(stratum) * count / len(strata)
        assert abs(sum(strata[position] == stratum for position in chosen) - share) < 1 + 1e-9


IMAGES, LABELS = torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
MISTAKES: dict[str, Callable[[], object]] = {
    "inputs must be N x C": lambda: Split(IMAGES[:, 0, 0, 0], LABELS),
    "uint8, float32 or": lambda: Split(IMAGES.double(), LABELS),
    "labels must be one int64 for each of 3": lambda: Split(IMAGES, LABELS[:2]),
    "domains must be one int64": lambda: Split(IMAGES, LABELS, LABELS.float()),
    "bad: labels must be from 0 to 2, not 0 to 3": lambda: bad(3, "first", "second"),
    "bad: domains must be from 0 to 0": lambda: bad(4, "first"),
    "go together": lambda: bad(4),
}


def bad(classes: int, *domains: str) -> Data:
    split = make_data().train
    return Data("bad", split, split, classes, domains)


@pytest.mark.parametrize("message", MISTAKES)
def test_malformed_data_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()


@pytest.mark.parametrize("most", [1, 3 * 36 * 4, 2**20])
def test_batches_one_after_another_are_what_each_is_by_itself(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.data.splits.MOST_TOGETHER", most)
    split = make_data().standardized().train
    indices, sizes = torch.randperm(40), [3, 1, 7, 2, 0, 27]
    wanted = [split.batch(part) for part in indices.split(sizes)]
    got = list(split.batches(indices, sizes))
    assert len(got) == len(wanted)
    for (inputs, labels), (own_inputs, own_labels) in zip(got, wanted, strict=True):
        assert inputs.is_contiguous()
        assert torch.equal(inputs, own_inputs)
        assert torch.equal(labels, own_labels)
    assert list(split.batches(indices[:0], [])) == []
