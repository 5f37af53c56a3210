"""Drawn streets: the same every time, with another light in every city, cut together with their label maps."""

import numpy as np
import pytest
import torch

from fedbn_flwr.data import load, partition
from fedbn_flwr.data.augmentation import IGNORED, Edits, FlipRotate


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
    assert [set(data.train.domains[part].tolist()) for part in parts] == [{city} for city in range(6)]


def test_labels_that_are_not_there_divide_nothing() -> None:
    with pytest.raises(ValueError, match="streets has label maps and no labels: take iid, city, domain or union"):
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
