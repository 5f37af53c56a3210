"""ImageNet-1K (ILSVRC 2012) and Tiny-ImageNet.

Both are normalized with ImageNet's usual mean and deviation, as in PyTorch's training script, which
FixBN follows. Classes are numbered in the order of their names, which are WordNet's identifiers.
The test split is the validation split, since the labels of the test split are not published.
"""

import csv
from pathlib import Path

from fedbn_flwr.data.sets.listing import (
    DataFilesError,
    FileList,
    folders,
    images,
    list_classes,
    read_lines,
    require,
)
from fedbn_flwr.data.splits import Data

#: of the channels of ImageNet's training images, as they are used everywhere
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def imagenet(home: Path, side: int = 224, workers: int = 0) -> Data:
    """Read `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`, or the folders of the Kaggle archive.

    That one has its images in `ILSVRC/Data/CLS-LOC`, where `val` has no folders: the classes are in
    `LOC_val_solution.csv` beside `ILSVRC`. An image is scaled to 8/7 of the side and its middle cut
    out.
    """
    train, test, classes = list_imagenet(home)
    lists = [listed.split(side, "center", MEAN, STD, workers) for listed in (train, test)]
    return Data("imagenet", lists[0], lists[1], len(classes))


def list_imagenet(home: Path) -> tuple[FileList, FileList, list[str]]:
    """List the files of both splits, and the classes."""
    inner = ""
    if (home / "ILSVRC").is_dir():
        inner = "ILSVRC/Data/CLS-LOC/"
    require(home / inner / "train", "a folder of training images with a folder for each class")
    classes = folders(home / inner / "train")
    if not classes:
        raise DataFilesError(f"{home / inner / 'train'} has no folder of a class")
    train = list_classes(home, f"{inner}train", classes)
    require(home / inner / "val", "a folder of validation images")
    if folders(home / inner / "val"):
        return train, list_classes(home, f"{inner}val", classes), classes
    return train, _flat_validation(home, f"{inner}val", classes), classes


def _flat_validation(home: Path, folder: str, classes: list[str]) -> FileList:
    """List validation images that are in one folder, with their classes in Kaggle's table."""
    path = require(home / "LOC_val_solution.csv", f"the classes of the images in {home / folder}")
    with path.open(newline="") as file:
        rows = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
    listed = FileList(home)
    numbers = {name: number for number, name in enumerate(classes)}
    for image in images(home / folder):
        name = rows.get(Path(image).stem, "")
        if name not in numbers:
            raise DataFilesError(f"{path} has no known class for {image}")
        listed.add([f"{folder}/{image}"], [numbers[name]])
    return _some(listed, home / folder)


def tiny_imagenet(home: Path, side: int = 64, workers: int = 0) -> Data:
    """Read the 200 classes of `tiny-imagenet-200`: `train/CLASS/images` and `val/images` with their
    annotations.
    """
    train, test, classes = list_tiny_imagenet(home)
    lists = [listed.split(side, "squash", MEAN, STD, workers) for listed in (train, test)]
    return Data("tiny-imagenet", lists[0], lists[1], len(classes))


def list_tiny_imagenet(home: Path) -> tuple[FileList, FileList, list[str]]:
    """List the files of both splits, and the classes."""
    classes = sorted(read_lines(home / "wnids.txt", "the names of the classes, one a line"))
    train = list_classes(home, "train", classes, "images")
    path = home / "val" / "val_annotations.txt"
    test = FileList(home)
    numbers = {name: number for number, name in enumerate(classes)}
    for line in read_lines(path, "file and class of each validation image"):
        file, name, *_ = [*line.split("\t"), ""]
        if name not in numbers:
            raise DataFilesError(f"{path} has the unknown class {name!r} for {file}")
        test.add([f"val/images/{file}"], [numbers[name]])
    return train, _some(test, path), classes


def _some(listed: FileList, where: Path) -> FileList:
    if not listed:
        raise DataFilesError(f"{where}: no image")
    return listed
