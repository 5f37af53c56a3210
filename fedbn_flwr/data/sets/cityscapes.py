"""Cityscapes: street scenes with a label map each, by city.

An image has no label of its own: `labels` are all 0, and a batch's targets are its label maps, N x
H x W, with the 19 classes that are evaluated as 0 to 18 and all others as `IGNORED`, which torch's
cross entropy leaves out. The cities are the domains; those of the test split (the published
validation split) are others than those of training.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedbn_flwr.data.augmentation import IGNORED, Size
from fedbn_flwr.data.decoding import Fit
from fedbn_flwr.data.file_split import FileSplit, ImageFiles
from fedbn_flwr.data.sets.imagenet import MEAN, STD
from fedbn_flwr.data.sets.listing import DataFilesError, FileList, folders, images, require
from fedbn_flwr.data.splits import Data

#: height and width of all images
FULL_SIZE = 1024, 2048
#: the values of label maps that are evaluated, in the order of the classes 0 to 18, by the classes'
#: published names
CLASSES = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
IMAGE = "_leftImg8bit.png"
LABELS = "_gtFine_labelIds.png"


def cityscapes(home: Path, side: int = 768, workers: int = 0) -> Data:
    """Read `leftImg8bit/SPLIT/CITY` and `gtFine/SPLIT/CITY`.

    Training images are windows of `side` x `side` pixels.

    Windows are cut out of the middle; with the augmentation `random-crop`, as in FixBN, at a random
    place. Test images are whole, 2048 x 1024 pixels.
    """
    train, test, cities = list_cityscapes(home)
    splits = (
        _split(train, (side, side), "window", workers),
        _split(test, FULL_SIZE, "squash", workers),
    )
    return Data("cityscapes", *splits, len(CLASSES), tuple(cities), tuple(CLASSES), "segmentation")


def _split(listed: FileList, size: Size, fit: Fit, workers: int) -> FileSplit:
    split = listed.split(size, fit, MEAN, STD, workers)
    maps = ImageFiles(listed.root, [label_map_name(name) for name in listed.names])
    return replace(split, maps=maps, classes=class_of_value([*CLASSES.values()]))


def list_cityscapes(home: Path) -> tuple[FileList, FileList, list[str]]:
    """List the images of both splits and the cities; an image without a label map is an error."""
    both = (FileList(home), FileList(home))
    cities = list[str]()
    for listed, role in zip(both, ("train", "val"), strict=True):
        parent = require(
            home / "leftImg8bit" / role,
            "a folder of images for each city (leftImg8bit_trainvaltest.zip)",
        )
        require(
            home / "gtFine" / role, "a folder of label maps for each city (gtFine_trainvaltest.zip)"
        )
        for city in folders(parent):
            names = [
                os.path.join("leftImg8bit", role, city, name) for name in images(parent / city)
            ]
            if not names:
                raise DataFilesError(f"{parent / city}: no image of city {city}")
            absent = [name for name in names if not (home / label_map_name(name)).exists()]
            if absent:
                raise DataFilesError(
                    f"{home / label_map_name(absent[0])} is missing: the label map of {absent[0]}"
                )
            if city not in cities:
                cities.append(city)
            listed.add(names, [0] * len(names), cities.index(city))
        if not listed:
            raise DataFilesError(f"{parent} has no folder of a city")
    return *both, cities


def label_map_name(name: str) -> str:
    """Return the file of an image's label map."""
    return name.replace("leftImg8bit", "gtFine", 1).removesuffix(IMAGE) + LABELS


def class_of_value(values: Sequence[int]) -> torch.Tensor:
    """Return the class of each byte of a label map, where these are the values of the classes, and
    `IGNORED` for all others.

    The licence plate's value is -1, which a byte holds as 255.
    """
    classes = torch.full((256,), IGNORED)
    classes[torch.tensor(values)] = torch.arange(len(values))
    return classes
