"""Data sets in files: the data sets of torchvision, and images in a folder per class."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn_flwr.data.splits import Data, Split
from fedbn_flwr.plugins import extra

#: by the name of a data set: the name of its torchvision class, and the number of classes
TORCHVISION = {
    "cifar10": ("CIFAR10", 10),
    "cifar100": ("CIFAR100", 100),
    "mnist": ("MNIST", 10),
    "fashion-mnist": ("FashionMNIST", 10),
    "svhn": ("SVHN", 10),
    "usps": ("USPS", 10),
}


def from_torchvision(name: str, root: Path) -> Data:
    """Read a data set in the folders and formats of torchvision, which downloads it if it is absent.

    A data set that is absent and cannot be downloaded is a FileNotFoundError.
    """
    kind, num_classes = TORCHVISION[name]
    return Data(name, _read(name, kind, root, "train"), _read(name, kind, root, "test"), num_classes)


def from_folder(path: Path, side: int | None) -> Data:
    """Read RGB images in `train/CLASS/` and `test/CLASS/`, or, with domains, `DOMAIN/train/CLASS/` and so on.

    Classes and domains are numbered in alphabetical order. Images of different sizes need a `side`.
    """
    domains = [] if (path / "train").is_dir() else _folders(path, having="train")
    homes = [path / domain for domain in domains] or [path]
    classes = sorted({name for home in homes for name in _folders(home / "train")})
    if not classes:
        raise ValueError(f"folder:{path}: found neither train/CLASS/ nor DOMAIN/train/CLASS/ in it")
    train, test = (_images([home / role for home in homes], classes, side) for role in ("train", "test"))
    return Data(path.name, train, test, len(classes), tuple(domains) if len(domains) > 1 else ())


def _read(name: str, kind: str, root: Path, role: str) -> Split:
    dataset = _open(name, kind, root, {"split": role} if kind == "SVHN" else {"train": role == "train"})
    inputs = torch.as_tensor(dataset.data)
    if inputs.dim() == 3:  # one channel
        inputs = inputs.unsqueeze(1)
    elif inputs.shape[-1] == 3:  # channels last
        inputs = inputs.permute(0, 3, 1, 2)
    labels = dataset.labels if kind == "SVHN" else dataset.targets
    return Split(inputs.contiguous(), torch.as_tensor(labels, dtype=torch.int64))


def _open(name: str, kind: str, root: Path, arguments: dict[str, Any]) -> Any:
    with extra("data"):  # imported here because it takes seconds
        from torchvision import datasets

    try:
        return getattr(datasets, kind)(root, **arguments, download=False)
    except (RuntimeError, FileNotFoundError):
        pass  # torchvision raises these where the data set is absent
    try:
        return getattr(datasets, kind)(root, **arguments, download=True)
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"{name} is not in {root} and cannot be downloaded: {reason}") from error


def _folders(path: Path, having: str = "") -> list[str]:
    """Return the sorted names of the folders in a folder; with `having`, of those that have a folder of this name."""
    entries = path.iterdir() if path.is_dir() else []
    return sorted(entry.name for entry in entries if (entry / having).is_dir())


def _images(homes: list[Path], classes: list[str], side: int | None) -> Split:
    """Read the images of one folder of classes, or of one folder of classes a domain."""
    with extra("data"):
        from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    for home in homes:
        if unknown := sorted(set(_folders(home)) - set(classes)):
            raise ValueError(f"{home} has a class that no training folder has: {', '.join(unknown)}")
    numbers = {name: number for number, name in enumerate(classes)}
    images = [make_dataset(home, numbers, IMG_EXTENSIONS, allow_empty=True) for home in homes]
    if empty := [str(home) for home, files in zip(homes, images, strict=True) if not files]:
        raise ValueError(f"no image in {', '.join(empty)}")
    inputs = _decode([file for files in images for file, _ in files], side)
    labels = torch.tensor([label for files in images for _, label in files])
    domains = torch.arange(len(homes)).repeat_interleave(torch.tensor([len(files) for files in images]))
    return Split(inputs, labels, domains if len(homes) > 1 else None)


def _decode(files: list[str], side: int | None) -> torch.Tensor:
    with extra("data"):
        from PIL import Image

    pixels = []
    for file in files:
        with Image.open(file) as image:
            colour = image.convert("RGB")
        pixels.append(np.asarray(colour.resize((side, side), Image.Resampling.BILINEAR) if side else colour))
        if pixels[-1].shape != pixels[0].shape or pixels[0].shape[0] != pixels[0].shape[1]:
            raise ValueError(f"{file} is not square or not of the size of the others: give an image size")
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
