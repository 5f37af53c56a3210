"""Data sets in files: the data sets of torchvision, and images in a folder per class."""

import os
from collections.abc import Iterator
from http.client import HTTPException
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.data.decoding import Fit, read_image
from fedbn_flwr.data.sets import mnist
from fedbn_flwr.data.sets.listing import SUFFIXES, FileList, below, folders, is_image, require
from fedbn_flwr.data.splits import Data, Split
from fedbn_flwr.plugins import extra, fingerprint

#: the share of images that is for testing where a folder has no split
HELD_OUT = 0.2
#: decoded bytes of images in folders up to which they are all kept in memory
MOST_IN_MEMORY = 2**28

#: by the name of a data set: the name of its torchvision class, and the number of classes
TORCHVISION = {
    "cifar10": ("CIFAR10", 10),
    "cifar100": ("CIFAR100", 100),
    "mnist": ("MNIST", 10),
    "fashion-mnist": ("FashionMNIST", 10),
    "svhn": ("SVHN", 10),
    "usps": ("USPS", 10),
}


def from_torchvision(name: str, root: Path, elsewhere: bool = True) -> Data:
    """Read a data set in the folders and formats of torchvision.

    MNIST and Fashion-MNIST are also read from a folder of their four files. With `elsewhere`, what
    is not in `root` comes from a package of the system, or is downloaded; a data set that is
    nowhere is a FileNotFoundError.
    """
    kind, num_classes = TORCHVISION[name]
    if name in mnist.FOLDERS:
        places = mnist.places(name, root, elsewhere)
        home = mnist.home_of(places)
        if not home:
            _read(name, root, "train", elsewhere, places)  # brings the files of both
            home = root / kind / "raw"
        train, test = (Split(*mnist.read_split(home, role)) for role in mnist.FILES)
    else:
        train, test = (
            Split(*_read(name, root, role, elsewhere, [root])) for role in ("train", "test")
        )
    return Data(name, train, test, num_classes)


def from_folder(path: Path, side: int | None, workers: int = 0) -> Data:
    """Read RGB images in `train/CLASS/` and `test/CLASS/`, or, with domains, `DOMAIN/train/CLASS/`
    and so on. Where no folder is called `test`, `val` is meant.

    Of images in `CLASS/`, or `DOMAIN/CLASS/`, a fifth of every class and domain is the test split,
    always the same. Classes and domains are numbered in alphabetical order. Images of different
    sizes need a `side`. Images that take more than `MOST_IN_MEMORY` bytes stay in their files,
    which `workers` processes decode.
    """
    lists, classes, domains = list_folder(path)
    first = read_image(lists[0].path(0))
    size = side or first.width
    fit: Fit = "squash" if side else "exact"
    files = [listed.split(size, fit, workers=workers) for listed in lists]
    fits = 3 * size * size * sum(map(len, lists)) <= MOST_IN_MEMORY
    splits: list[Split] = [split.in_memory() for split in files] if fits else [*files]
    # of 8 and of 16 bits; mini-batches from files are floats
    if splits[0].inputs.dtype != splits[1].inputs.dtype:
        splits = [*files]
    train, test = splits
    return Data(path.name, train, test, len(classes), tuple(domains), tuple(classes))


def list_images(path: Path) -> FileList:
    """List the files of both splits together."""
    together = FileList(path)
    for listed in list_folder(path)[0]:
        together.names += listed.names
    return together


def list_folder(path: Path) -> tuple[list[FileList], list[str], list[str]]:
    """List the files of both splits, the classes, and the domains if there are several."""
    names = folders(require(path, "the folder that folder:PATH names"))
    domains = []
    if "train" not in names:
        domains = [name for name in names if (path / name / "train").is_dir()]
    is_split = "train" in names or len(domains) > 0
    if not is_split:
        domains = [name for name in names if folders(path / name)]
    homes = domains or ["."]
    roles = [""]
    if is_split:
        roles = ["train", test_role(path, homes)]
    classes = sorted({name for home in homes for name in folders(path / home / roles[0])})
    if not classes:
        raise ValueError(
            f"folder:{path}: found neither train/CLASS/ nor DOMAIN/train/CLASS/ nor DOMAIN/CLASS/ "
            "in it"
        )
    lists = []
    for role in roles:
        places = [os.path.join(home, role) for home in homes]
        lists.append(_list(path, places, classes))
    if len(lists) > 1:
        divided = lists
    else:
        divided = _divided(lists[0], 2 if domains else 1)
    return divided, classes, domains if len(domains) > 1 else []


def test_role(path: Path, homes: list[str]) -> str:
    """Return the name of the folders of test images: `test`, or `val` where nobody has that."""
    for role in ("test", "val"):
        if any((path / home / role).is_dir() for home in homes):
            return role
    raise ValueError(f"folder:{path}: beside train, there is neither test nor val")


def _divided(listed: FileList, depth: int) -> list[FileList]:
    """Divide files into training and test files by their names below the class, which is so many
    folders deep.

    So other classes and domains do not move them.
    """
    strata: dict[tuple[int, int | None], list[str]] = {}
    for name, label, domain in zip_longest(listed.names, listed.labels, listed.domains):
        strata.setdefault((label, domain), []).append(name)
    train = FileList(listed.root)
    test = FileList(listed.root)
    for (label, domain), names in strata.items():
        ordered = sorted(names, key=lambda name: fingerprint(os.sep.join(Path(name).parts[depth:])))
        count = max(round(HELD_OUT * len(names)), len(names) > 1)
        for part, chosen in ((test, ordered[:count]), (train, ordered[count:])):
            part.add(sorted(chosen), [label] * len(chosen), domain)
    if not len(test):
        raise ValueError(f"folder:{listed.root}: no class has two images, one of them for testing")
    return [train, test]


def _read(
    name: str, root: Path, role: str, download: bool, places: list[Path]
) -> tuple[Tensor, Tensor]:
    """Read a split, and download it if it may; an error says that it is in none of the places."""
    try:
        return _read_split(name, root, role)
    except (RuntimeError, FileNotFoundError) as error:
        # torchvision raises these where the data set is absent
        reason = " ".join(str(error).split())
    except (OSError, ValueError, EOFError) as error:  # not all files have sums that are compared
        if isinstance(error, OSError) and error.errno:  # the system's, which names the file
            raise
        raise ValueError(f"the files of {name} in {root} are damaged: {error}") from error
    absent = f"{name} is not in {' or '.join(map(str, places))}"
    if not download:
        raise FileNotFoundError(f"{absent}, or broken: {reason}")
    try:
        return _read_split(name, root, role, download=True)
    except (RuntimeError, OSError, HTTPException, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(
            f"{absent}, and cannot be downloaded: {reason}. docs/data.md says where"
        ) from error


def _read_split(name: str, root: Path, role: str, download: bool = False) -> tuple[Tensor, Tensor]:
    """Return the images (N x C x H x W) and labels of a split.

    Raises what torchvision's class raises.
    """
    kind, _ = TORCHVISION[name]
    chosen: dict[str, Any] = {"split": role} if kind == "SVHN" else {"train": role == "train"}
    with extra("data"):
        from torchvision import datasets  # imported here because it takes seconds

        # imports scipy for SVHN
        dataset = getattr(datasets, kind)(root, **chosen, download=download)
    inputs = torch.as_tensor(dataset.data)
    if inputs.dim() == 3:  # one channel
        inputs = inputs.unsqueeze(1)
    elif inputs.shape[-1] == 3:  # channels last
        inputs = inputs.permute(0, 3, 1, 2)
    if kind == "SVHN":
        labels = dataset.labels
    else:
        labels = dataset.targets
    return inputs.contiguous(), torch.as_tensor(labels, dtype=torch.int64)


def _list(path: Path, homes: list[str], classes: list[str]) -> FileList:
    listed = FileList(path)
    for home in homes:
        unknown = sorted(set(folders(path / home)) - set(classes))
        if unknown:
            raise ValueError(
                f"{path / home} has a class that no training folder has: {', '.join(unknown)}"
            )
    for domain, home in enumerate(homes):
        files = _files(path / home, classes)
        if not files:
            raise ValueError(
                f"no image in {path / home}: names of images end in {', '.join(SUFFIXES)}"
            )
        names = [os.path.relpath(file, path) for file, _ in files]
        listed.add(names, [label for _, label in files], domain if len(homes) > 1 else None)
    return listed


def _files(home: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Return the images in a folder of classes with their labels, by class and then by path.

    They are those that torchvision's `make_dataset` finds, but for macOS' files `._NAME`. Its
    import would take 4.8 CPU seconds of each message to a site.
    """
    return [
        (Path(parent, name), number)
        for number, name_of_class in enumerate(classes)
        for parent, names in sorted(_walk(home / name_of_class))
        for name in sorted(names)
        if is_image(name)
    ]


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Return every folder with the names of its files.

    A link to a folder that it lies in is not followed.
    """
    for parent, inside, names in os.walk(top, followlinks=True):
        inside[:] = below(parent, inside)
        yield parent, names
