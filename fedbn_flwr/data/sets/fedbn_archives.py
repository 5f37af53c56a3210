"""Digits-Five, Office-Caltech-10 and DomainNet, as FedBN published them; FedTAN and FedWon use them
too.

Digits-Five has MNIST, SVHN, USPS, SynthDigits and MNIST-M as five domains of 28 x 28 RGB images.
FedBN draws four fifths of all samples of each for training and one for testing, and then trains on
7,438 of each domain, as many as USPS has. Pixels are normalized with mean and deviation 0.5, as in
FedBN's code.

The other two have two pickle files for each domain, `DOMAIN_train.pkl` and `DOMAIN_test.pkl`, of
paths and names of classes. Images are scaled to 256 x 256 pixels, as values from 0 to 1, and not
normalized further: so does FedBN's code.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization, ICLR 2021.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.pixels import resize
from fedbn_flwr.data.sets.listing import DataFilesError, FileList, require
from fedbn_flwr.data.splits import Data, Split

#: names of the domains, and of their folders in FedBN's archive, in the order of its code
DIGITS = {
    "mnist": "MNIST",
    "svhn": "SVHN",
    "usps": "USPS",
    "synth": "SynthDigits",
    "mnist-m": "MNIST_M",
}
#: training samples of a domain in FedBN
DIGITS_SAMPLES = 7438
HALF = (0.5, 0.5, 0.5)

#: images N x 3 x H x W and labels
Columns = tuple[Tensor, Tensor]
#: what a pickle of NumPy arrays, numbers and text refers to
ALLOWED = {
    ("_codecs", "encode"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


def digits_five(
    home: Path, side: int = 28, _workers: int = 0, samples: int = DIGITS_SAMPLES
) -> Data:
    """Read the five domains into memory; of each the first `samples` training images, with 0 all of
    them.
    """
    splits = []
    for role in ("train", "test"):
        most = None
        if samples and role == "train":
            most = samples
        parts = []
        for name, folder in DIGITS.items():
            parts.append(_sized(name, role, _digits(home / folder, role), side, most))
        domains = [torch.full_like(labels, number) for number, (_, labels) in enumerate(parts)]
        inputs, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
        splits.append(Split(inputs, labels, torch.cat(domains), HALF, HALF))
    return Data("digits-five", splits[0], splits[1], 10, tuple(DIGITS))


def _digits(folder: Path, role: str) -> Columns:
    """Read `test.pkl`, or the ten parts in `partitions`, or without these `train.pkl`."""
    parts = [folder / "partitions" / f"train_part{number}.pkl" for number in range(10)]
    if role == "test" or not parts[0].exists():
        parts = [folder / f"{role}.pkl"]
    pairs = [read_pair(path, f"a {role} part of FedBN's Digits-Five") for path in parts]
    images = np.concatenate(
        [_bytes(path, images) for path, (images, _) in zip(parts, pairs, strict=True)]
    )
    labels = np.concatenate([np.asarray(labels).reshape(-1) for _, labels in pairs]).astype(
        np.int64
    )
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    if tensor.dim() == 3:
        colour = tensor.unsqueeze(1).expand(-1, 3, -1, -1)
    else:
        colour = tensor.permute(0, 3, 1, 2)
    return colour, torch.from_numpy(labels)


def _bytes(path: Path, images: Any) -> NDArray[np.uint8]:
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise DataFilesError(
            f"{path} has images of shape {array.shape}, {array.dtype}, not N x H x W [x 3] bytes"
        )
    return array


def _sized(name: str, role: str, columns: Columns, side: int, most: int | None) -> Columns:
    """Scale the images, and refuse labels that are no digits or lack one."""
    images = columns[0][:most]
    labels = columns[1][:most]
    if not (len(labels) and 0 <= labels.min() <= labels.max() < 10):
        raise DataFilesError(f"digits-five: {role} labels of {name} are not digits from 0 to 9")
    empty = [str(digit) for digit in np.flatnonzero(np.bincount(labels, minlength=10) == 0)]
    if empty:
        raise DataFilesError(f"digits-five: no {role} image of class {', '.join(empty)} in {name}")
    if images.shape[-2:] != (side, side):
        images = resize(images.contiguous(), side)
    return images, labels


@dataclass(frozen=True)
class Lists:
    """The folder, domains and classes of a data set with such lists."""

    name: str
    about: str
    folder: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]


OFFICE = Lists(
    "office-caltech-10",
    "Ten classes of objects in four domains",
    "office_caltech_10",
    ("amazon", "caltech", "dslr", "webcam"),
    (
        "back_pack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    ),
)
DOMAINNET = Lists(
    "domainnet",
    "DomainNet's ten largest classes in six domains",
    "DomainNet",
    ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    (
        "bird",
        "feather",
        "headphones",
        "ice_cream",
        "teapot",
        "tiger",
        "whale",
        "windmill",
        "wine_glass",
        "zebra",
    ),
)
NOT_NORMALIZED = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def read_domains(
    lists: Lists, home: Path, side: int = 256, workers: int = 0, samples: int = 0
) -> Data:
    """Read a data set with one list a domain and split.

    `samples` takes the first so many of each training list.
    """
    train, test = list_domains(lists, home, samples)
    splits = [listed.split(side, "squash", *NOT_NORMALIZED, workers) for listed in (train, test)]
    return Data(lists.name, splits[0], splits[1], len(lists.classes), lists.domains)


def list_domains(lists: Lists, home: Path, samples: int = 0) -> tuple[FileList, FileList]:
    """List the files of both splits; paths in the lists begin with the folder's published name."""
    require(home, f"the folder {lists.folder} with the lists and images")
    both = FileList(home), FileList(home)
    for number, domain in enumerate(lists.domains):
        for listed, role, most in zip(
            both, ("train", "test"), (samples or None, None), strict=True
        ):
            path = home / f"{domain}_{role}.pkl"
            files, classes = read_pair(path, f"FedBN's list of {role} images of {domain}")
            unknown = [str(name) for name in classes if str(name) not in lists.classes]
            if unknown:
                known = ", ".join(lists.classes)
                raise DataFilesError(
                    f"{path} has the unknown class {unknown[0]!r}; there are: {known}"
                )
            labels = [lists.classes.index(str(name)) for name in classes]
            empty = [name for label, name in enumerate(lists.classes) if label not in set(labels)]
            if empty:
                raise DataFilesError(f"{path}: no image of class {', '.join(empty)}")
            names = [
                str(file).removeprefix("./").removeprefix(f"{lists.folder}/") for file in files
            ]
            listed.add(names[:most], labels[:most], number)
    return both


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return super().find_class(module, name)


def read_pair(path: Path, what: str) -> tuple[Any, Any]:
    """Return the two columns of a pickle file, images (or paths) and labels."""
    with require(path, what).open("rb") as file:
        try:
            first, second = _Unpickler(file).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            AttributeError,
            IndexError,
        ) as error:
            reason = " ".join(str(error).split())
            raise DataFilesError(
                f"{path} is not a pickle file of images and labels: {reason}"
            ) from None
    if len(first) != len(second):
        raise DataFilesError(f"{path} has {len(first)} images and {len(second)} labels")
    return first, second
