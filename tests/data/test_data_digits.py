"""The embedded data: real digits, five domains made from them and from fonts, and drawn streets."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedbn_flwr.data import load, partition
from fedbn_flwr.data.augmentation import IGNORED, Edits, FlipRotate
from fedbn_flwr.data.domains import (
    DOMAINS,
    TEST_FONTS,
    TRAIN_FONTS,
    digits_domains,
    drawn,
    real_digits,
)


def test_360_of_1797_digits_are_held_out_a_fifth_of_every_class() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 8)
    everything = np.bincount(load_digits().target)
    for label, count in enumerate(torch.bincount(data.test.labels).tolist()):
        assert abs(count - everything[label] * 360 / 1797) < 1


def test_the_file_is_read_as_scikit_learn_reads_it() -> None:
    images, labels, _ = real_digits()
    expected, targets = load_digits(return_X_y=True)
    assert np.array_equal(images.reshape(-1, 64), (expected / 16).astype(np.float32))
    assert np.array_equal(labels, targets)


def test_five_domains_of_ten_classes() -> None:
    data = load("digits-domains")
    assert data.domain_names == DOMAINS == ("real", "fonts", "photos", "inverted", "sheared")
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 3, 28)
    for split, counts in ((data.train, [1437, 1440, 1437, 1437, 1437]), (data.test, [360] * 5)):
        assert split.inputs.dtype == torch.uint8
        assert split.domains is not None
        assert torch.bincount(split.domains).tolist() == counts
        assert (torch.bincount(split.domains * 10 + split.labels, minlength=50) >= 30).all()


def test_the_domains_are_deterministic() -> None:
    first, second = digits_domains(), digits_domains()
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.inputs, second.test.inputs)


def test_domains_of_real_digits_show_the_digits_of_their_split() -> None:
    _, labels, test = real_digits()
    data = load("digits-domains")
    for split, chosen in ((data.train, ~test), (data.test, test)):
        for domain in ("real", "photos", "inverted", "sheared"):
            assert torch.equal(
                split.labels[split.domains == DOMAINS.index(domain)],
                torch.from_numpy(labels[chosen]),
            )
        inverted = (
            split.inputs[split.domains == DOMAINS.index("inverted")].float().mean(1).flatten(1)
        )
        real = split.inputs[split.domains == DOMAINS.index("real")].float().mean(1).flatten(1)
        # of all inverted images, that of the very same digit resembles it least
        correlation = torch.corrcoef(torch.cat([real[:100], inverted[:100]]))[:100, 100:]
        assert torch.equal(correlation.argmin(1), torch.arange(100))


def test_fonts_draw_every_digit_as_often_and_with_ink() -> None:
    assert not set(TRAIN_FONTS) & set(TEST_FONTS)
    images, labels = drawn(("cmr10", "DejaVuSans"), torch.Generator().manual_seed(0))
    assert torch.bincount(labels).tolist() == [18] * 10
    assert images.shape == (180, 3, 28, 28)
    assert (images.flatten(1).std(1) > 0.05).all()


# ---- drawn streets -------------------------------------------------------------------------------


def test_the_same_streets_are_drawn_every_time() -> None:
    data = load("streets:cities=2:images=3:test=2")
    wanted, maps = data.train.batch(torch.arange(6))
    again, same = load("streets:cities=2:images=3:test=2:seed=0").train.batch(torch.arange(6))
    assert torch.equal(again, wanted)
    assert torch.equal(same, maps)
    other, _ = load("streets:cities=2:images=3:test=2:seed=1").train.batch(torch.arange(6))
    assert not torch.equal(other, wanted)


def test_every_class_is_there_and_the_hood_has_none() -> None:
    data = load("streets")
    assert data.task == "segmentation"
    inputs, maps = data.test.batch(torch.arange(48))
    assert inputs.shape == (48, 3, 32, 64)
    assert maps.unique().tolist() == [IGNORED, 0, 1, 2, 3, 4]
    assert (maps[:, -1, 16:-16] == IGNORED).all()
    assert (maps[:, 0] != IGNORED).all()
    assert data.train.batch(torch.arange(2))[1].shape == (2, 32, 32)


def test_cities_go_from_dark_to_bright() -> None:
    data = load("streets")
    assert data.train.domains is not None
    inputs, _ = data.train.batch(torch.arange(len(data.train)))
    light = torch.stack([inputs[data.train.domains == city].mean() for city in range(6)])
    assert light[0] < light[2] < light[5]
    parts = partition("city", data, 6, 0)
    assert [set(data.train.domains[part].tolist()) for part in parts] == [
        {city} for city in range(6)
    ]


def test_labels_that_are_not_there_divide_nothing() -> None:
    with pytest.raises(
        ValueError, match="streets has label maps and no labels: take iid, city, domain or union"
    ):
        partition("classes:2", load("streets"), 6, 0)


def test_label_maps_stay_with_their_images_in_chosen_samples_and_in_a_validation_split() -> None:
    data = load("streets:cities=2:images=6:test=1")
    everything, maps = data.train.batch(torch.arange(12))
    assert not torch.equal(maps[1], maps[2])
    inputs, targets = data.train.select(np.array([5, 2])).batch(torch.tensor([1]))
    assert torch.equal(inputs[0], everything[2])
    assert torch.equal(targets[0], maps[2])
    parts = data.validation_split(0.25, seed=0)
    found = []
    for split in (parts.train, parts.test):
        for image, target in zip(*split.batch(torch.arange(len(split))), strict=True):
            (row,) = [row for row in range(12) if torch.equal(everything[row], image)]
            assert torch.equal(target, maps[row])
            found.append(row)
    assert (len(parts.test), sorted(found)) == (3, list(range(12)))


def test_rotated_corners_have_no_class() -> None:
    data = load("streets:cities=1:images=1:test=1")
    edits = Edits(FlipRotate(45.0), torch.arange(20))
    ((_, maps),) = data.train.batches(torch.zeros(20, dtype=torch.int64), [20], edits=edits)
    corners = maps[:, 0, 0]
    assert (corners == IGNORED).any()
    assert set(corners.tolist()) <= {IGNORED, 2, 3}  # houses and sky, and no road
