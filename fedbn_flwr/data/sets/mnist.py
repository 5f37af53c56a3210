"""MNIST and Fashion-MNIST, read as they lie: four files in a folder, gzipped or not."""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.sets.listing import DataFilesError, FileList

#: by the name of a data set: the folder in which torchvision keeps it, and one in which a package
#: of Debian does
FOLDERS = {
    "mnist": ("MNIST", None),
    "fashion-mnist": ("FashionMNIST", Path("/usr/share/datasets/fashion-mnist")),
}
#: by split, the files of images and of labels
FILES = {
    role: (f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte")
    for role, start in (("train", "train"), ("test", "t10k"))
}
NAMES = [name for pair in FILES.values() for name in pair]

Bytes = NDArray[np.uint8]


def places(name: str, root: Path, elsewhere: bool) -> list[Path]:
    """Return the folders in which the four files are looked for, in this order: in `root`, or also
    elsewhere.
    """
    folder, debian = FOLDERS[name]
    return [
        root / folder / "raw",
        root / folder,
        root / name,
        root,
        *([debian] if debian and elsewhere else []),
    ]


def home_of(folders: Iterable[Path]) -> Path | None:
    """Return the first of these folders that has all four files."""
    for folder in folders:
        if all(_path(folder, name) for name in NAMES):
            return folder
    return None


def list_files(name: str, root: Path) -> FileList:
    """List those of the four files that are in `root`."""
    home = home_of(places(name, root, elsewhere=False)) or root
    paths = [_path(home, each) for each in NAMES]
    return FileList(home, [path.name for path in paths if path])


def read_split(home: Path, role: str) -> tuple[Tensor, Tensor]:
    """Read the images (N x 1 x H x W) and labels of a split.

    Files that are broken are a DataFilesError.
    """
    images, labels = (
        _read(home, name, dims) for name, dims in zip(FILES[role], (3, 1), strict=True)
    )
    if len(images) != len(labels):
        raise DataFilesError(
            f"{home}: the {role} split has {len(images)} images and {len(labels)} labels"
        )
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def _path(home: Path, name: str) -> Path | None:
    return next((path for path in (home / name, home / f"{name}.gz") if path.is_file()), None)


def _read(home: Path, name: str, dims: int) -> Bytes:
    """Read an IDX file of bytes: two zeros, the type 8, the number of sizes, the sizes, and the
    bytes.
    """
    path = _path(home, name)
    if path is None:
        raise DataFilesError(f"{home / name} is missing, and {name}.gz, too")
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(path.read_bytes())
        else:
            content = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataFilesError(f"{path} cannot be read: {error}") from None
    start = 4 + 4 * dims
    sizes = np.frombuffer(content[4:start], ">u4").astype(int)
    if content[:4] != bytes([0, 0, 8, dims]) or len(content) != start + sizes.prod():
        dimensions = "1 dimension" if dims == 1 else f"{dims} dimensions"
        raise DataFilesError(f"{path} is not a whole IDX file of bytes with {dimensions}")
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(sizes)
