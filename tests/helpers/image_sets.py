"""Tiny image files in the layouts of published data sets."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fedbn_flwr.data.sets.fedbn_archives import OFFICE, Lists


def paint(
    path: Path, seed: int = 0, size: tuple[int, int] = (8, 8), grey: int | None = None
) -> Path:
    """Write an image (width x height) of random colours, or of one grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    if grey is not None:
        pixels[:] = grey
    Image.fromarray(pixels).save(path)
    return path


def write_imagenet(home: Path) -> Path:
    """Write `train/CLASS/*.JPEG` and two validation images for each of three classes."""
    for label in range(3):
        name = f"n{label:08d}"
        for number in range(4):
            paint(home / "train" / name / f"{name}_{number}.JPEG", 100 * label + number, (16, 12))
        for number in (2 * label, 2 * label + 1):
            paint(
                home / "val" / name / f"ILSVRC2012_val_{number:08d}.JPEG", 1000 + number, (16, 12)
            )
    return home


def write_tiny_imagenet(home: Path) -> Path:
    """Write the folders and lists of `tiny-imagenet-200`, with two classes."""
    names = ["n00000009", "n00000008"]  # the published list is not in alphabetical order
    home.mkdir(parents=True, exist_ok=True)
    (home / "wnids.txt").write_text("\n".join(names) + "\n")
    lines = []
    for label, name in enumerate(names):
        for number in range(3):
            paint(
                home / "train" / name / "images" / f"{name}_{number}.JPEG",
                10 * label + number,
                (64, 64),
            )
        paint(home / "val" / "images" / f"val_{label}.JPEG", 90 + label, (64, 64))
        lines.append(f"val_{label}.JPEG\t{name}\t0\t0\t62\t62")
    (home / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return home


def write_domain_lists(root: Path, lists: Lists) -> Path:
    """Write FedBN's lists and their images: two training images a class and domain, and one for
    testing.
    """
    for number, domain in enumerate(lists.domains):
        for role, count in (("train", 2), ("test", 1)):
            files, names = [], []
            for label, name in enumerate(lists.classes):
                for image in range(count):
                    file = f"{lists.folder}/{domain}/{name}/{role}_{image}.jpg"
                    paint(root / file, 100 * number + 10 * label + image, (10, 12))
                    files.append(file)
                    names.append(name)
            # as NumPy arrays and as lists: both are published
            columns = (np.array(files), np.array(names)) if role == "train" else (files, names)
            (root / lists.folder / f"{domain}_{role}.pkl").write_bytes(pickle.dumps(columns))
    return root / lists.folder


#: shape of an image in FedBN's archive
ARCHIVE = {
    "MNIST": (28, 28),
    "SVHN": (32, 32, 3),
    "USPS": (16, 16),
    "SynthDigits": (32, 32, 3),
    "MNIST_M": (28, 28, 3),
}


def write_digits_archive(home: Path) -> Path:
    """Write FedBN's archive: ten parts of five training digits a domain, and ten for testing."""
    for number, (folder, shape) in enumerate(ARCHIVE.items()):
        generator = np.random.default_rng(number)
        (home / folder / "partitions").mkdir(parents=True)
        for part in range(10):
            images = generator.integers(0, 256, (5, *shape), dtype=np.uint8)
            labels = (np.arange(5) + 5 * part) % 10
            (home / folder / "partitions" / f"train_part{part}.pkl").write_bytes(
                pickle.dumps((images, labels))
            )
        images = generator.integers(0, 256, (10, *shape), dtype=np.uint8)
        (home / folder / "test.pkl").write_bytes(pickle.dumps((images, np.arange(10)[:, None])))
    return home


def write_cityscapes(
    home: Path, size: tuple[int, int] = (64, 32), others: Sequence[int] = ()
) -> Path:
    """Write two cities for training and one for validation: the map's value is 7 on the left and 33
    on the right.

    The `others` are values of single pixels.
    """
    cities = {"train": {"aachen": 2, "bochum": 1}, "val": {"frankfurt": 2}, "test": {"berlin": 1}}
    values = np.full((size[1], size[0]), 7, dtype=np.uint8)
    values[:, size[0] // 2 :] = 33
    values[0, 0] = 3  # outside of the region of interest
    values[1, 1 : 1 + len(others)] = others
    for role, counts in cities.items():
        for city, count in counts.items():
            for number in range(count):
                name = f"{city}_{number:06d}_000019"
                paint(home / "leftImg8bit" / role / city / f"{name}_leftImg8bit.png", number, size)
                path = home / "gtFine" / role / city / f"{name}_gtFine_labelIds.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)
    return home


#: writes a data set into its folder of a data root, and returns the folder
WRITERS: dict[str, Callable[[Path], Path]] = {
    "imagenet": lambda root: write_imagenet(root / "imagenet"),
    "tiny-imagenet": lambda root: write_tiny_imagenet(root / "tiny-imagenet-200"),
    "office-caltech-10": lambda root: write_domain_lists(root, OFFICE),
    "digits-five": lambda root: write_digits_archive(root / "digits-five"),
    "cityscapes": lambda root: write_cityscapes(root / "cityscapes"),
}
