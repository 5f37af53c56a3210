"""Digits-Five: MNIST, SVHN, USPS, SynthDigits and MNIST-M as five domains of 28 x 28 RGB images.

It is read from FedBN's archive. FedBN draws four fifths of all samples of each for training and one for testing, and
then trains on 7,438 of each domain, as many as USPS has. Pixels are normalized with mean and deviation 0.5, as in
FedBN's code.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.pixels import resize
from fedbn_flwr.data.sets.listing import DataFilesError, read_pair
from fedbn_flwr.data.splits import Data, Split

#: names of the domains, and of their folders in FedBN's archive, in the order of its code
DOMAINS = {"mnist": "MNIST", "svhn": "SVHN", "usps": "USPS", "synth": "SynthDigits", "mnist-m": "MNIST_M"}
#: training samples of a domain in FedBN
SAMPLES = 7438
HALF = (0.5, 0.5, 0.5)

#: images N x 3 x H x W and labels
Columns = tuple[Tensor, Tensor]


def digits_five(home: Path, side: int = 28, samples: int = SAMPLES) -> Data:
    """Read the five domains; of each the first `samples` training images, with 0 all of them."""
    splits = []
    for role in ("train", "test"):
        most = samples if samples and role == "train" else None
        parts = []
        for name, folder in DOMAINS.items():
            parts.append(_sized(name, role, from_archive(home / folder, role), side, most))
        domains = [torch.full_like(labels, number) for number, (_, labels) in enumerate(parts)]
        inputs, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
        splits.append(Split(inputs, labels, torch.cat(domains), HALF, HALF))
    return Data("digits-five", splits[0], splits[1], 10, tuple(DOMAINS))


def from_archive(folder: Path, role: str) -> Columns:
    """Read `test.pkl`, or the ten parts in `partitions`, or without these `train.pkl`."""
    parts = [folder / "partitions" / f"train_part{number}.pkl" for number in range(10)]
    if role == "test" or not parts[0].exists():
        parts = [folder / f"{role}.pkl"]
    pairs = [read_pair(path, f"a {role} part of FedBN's Digits-Five") for path in parts]
    images = np.concatenate([_bytes(path, images) for path, (images, _) in zip(parts, pairs, strict=True)])
    labels = np.concatenate([np.asarray(labels).reshape(-1) for _, labels in pairs]).astype(np.int64)
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    colour = tensor.unsqueeze(1).expand(-1, 3, -1, -1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2)
    return colour, torch.from_numpy(labels)


def _bytes(path: Path, images: Any) -> NDArray[np.uint8]:
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise DataFilesError(f"{path} has images of shape {array.shape}, {array.dtype}, not N x H x W [x 3] bytes")
    return array


def _sized(name: str, role: str, columns: Columns, side: int, most: int | None) -> Columns:
    """Scale the images, and refuse labels that are no digits or lack one."""
    images, labels = columns[0][:most], columns[1][:most]
    counts = np.bincount(labels, minlength=10) if len(labels) and labels.min() >= 0 else np.zeros(0)
    if len(counts) != 10:
        raise DataFilesError(f"digits-five: {role} labels of {name} are not digits from 0 to 9")
    if empty := [str(digit) for digit in np.flatnonzero(counts == 0)]:
        raise DataFilesError(f"digits-five: no {role} image of class {', '.join(empty)} in {name}")
    return images if images.shape[-2:] == (side, side) else resize(images.contiguous(), side), labels
