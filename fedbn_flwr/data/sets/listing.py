"""Lists of image files and their labels, as the readers of data sets make them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedbn_flwr.data.augmentation import Size
from fedbn_flwr.data.decoding import Fit
from fedbn_flwr.data.file_split import FileSplit, ImageFiles
from fedbn_flwr.data.pixels import Channels
from fedbn_flwr.plugins import is_unicode

#: the ends of images' names
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class DataFilesError(ValueError):
    """Files of a data set that are absent or not as they should be, in one line."""


@dataclass
class FileList:
    """The images of one split: files below a folder, their labels, and domains if there are any."""

    root: Path
    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    def add(self, names: Sequence[str], labels: Sequence[int], domain: int | None = None) -> None:
        """Add files, with a label for each and one domain for all."""
        self.names += names
        self.labels += labels
        if domain is not None:
            self.domains += [domain] * len(names)

    def path(self, number: int) -> str:
        """Return the path of one image."""
        return os.path.join(self.root, self.names[number])

    def split(
        self,
        size: int | Size,
        fit: Fit = "squash",
        mean: Channels = (),
        std: Channels = (),
        workers: int = 0,
    ) -> FileSplit:
        """Return a split that decodes the files when it needs them."""
        images = ImageFiles(self.root, self.names)
        return FileSplit.of(
            images, self.labels, size, self.domains, mean=mean, std=std, fit=fit, workers=workers
        )


def list_below(home: Path) -> FileList:
    """List the files in a folder and in those below it, but for what is hidden."""
    listed = FileList(home)
    # a class may be a link to a folder elsewhere
    for place, inside, names in os.walk(home, followlinks=True):
        inside[:] = sorted(name for name in below(place, inside) if not name.startswith("."))
        here = os.path.relpath(place, home)
        listed.names += [
            os.path.join(here, name)
            for name in sorted(names)
            if not name.startswith(".") and os.path.isfile(os.path.join(place, name))
        ]
    return listed


def below(parent: str, names: Sequence[str]) -> list[str]:
    """Return those of the folders in a folder that lie below it, also by a link: it may itself lie
    in others.
    """
    above = {os.path.realpath(folder) for folder in (Path(parent), *Path(parent).parents)}
    return [name for name in names if os.path.realpath(os.path.join(parent, name)) not in above]


def folders(path: Path) -> list[str]:
    """Return the sorted names of the folders in a folder; none if it is absent."""
    if not path.is_dir():
        return []
    with os.scandir(path) as entries:
        names = sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )
    for name in names:
        if not is_unicode(name):
            raise DataFilesError(f"{path}: the name of the folder {name!a} is not UTF-8: rename it")
    return names


def images(path: Path) -> list[str]:
    """Return the sorted names of the images in a folder; none if it is absent."""
    if not path.is_dir():
        return []
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name))


def is_image(name: str) -> bool:
    """Return whether a file's name is that of an image.

    macOS puts a file `._NAME` beside each file that it copies to other systems.
    """
    return name.lower().endswith(SUFFIXES) and not name.startswith("._")


def list_classes(root: Path, home: str, classes: Sequence[str], inside: str = "") -> FileList:
    """List the images in `home/CLASS/inside` for every class.

    A class without an image is an error.
    """
    listed = FileList(root)
    for label, name in enumerate(classes):
        if inside:
            folder = os.path.join(home, name, inside)
        else:
            folder = os.path.join(home, name)
        found = images(root / folder)
        if not found:
            raise DataFilesError(f"{root / folder}: no image of class {name}")
        listed.add([os.path.join(folder, image) for image in found], [label] * len(found))
    return listed


def require(path: Path, what: str) -> Path:
    """Return a path that exists; one that does not is an error that says what is missing."""
    if not path.exists():
        raise DataFilesError(f"{path} is missing: {what}")
    return path


def read_lines(path: Path, what: str) -> list[str]:
    """Return the lines of a text file that are not empty."""
    return [line for line in require(path, what).read_text().splitlines() if line.strip()]
