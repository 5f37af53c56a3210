"""Image data sets of the Hugging Face Hub, by name; or ones that were saved to disk.

Images stay encoded in the memory-mapped files of the data set until a mini-batch needs them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.data.decoding import Fit, Source
from fedbn_flwr.data.file_split import FileSplit
from fedbn_flwr.data.sets.listing import DataFilesError
from fedbn_flwr.data.splits import Data
from fedbn_flwr.plugins import extra

#: names of splits that serve for testing, the first that a data set has
TEST_SPLITS = ("test", "validation", "valid", "val")


class ArrowImages:
    """The images of one column of a data set, as the bytes or paths that it holds."""

    def __init__(self, rows: Any, column: str) -> None:
        self._rows = rows
        self._column = column

    def __call__(self, rows: NDArray[np.int64]) -> list[Source]:
        """Return the images in these rows, encoded."""
        cells: Sequence[Mapping[str, Any]] = self._rows[rows.tolist()][self._column]
        return [cell["bytes"] or cell["path"] for cell in cells]


#: which splits, columns and configuration to use; where empty, the usual ones
CHOICES = {"train": "train", "test": "", "image": "", "label": "", "subset": ""}


def hugging_face(
    name: str, root: Path, side: int | None, workers: int, chosen: Mapping[str, str]
) -> Data:
    """Read a data set by its name on the Hub, or from a folder that `save_to_disk` wrote.

    By default the test split is the first of `TEST_SPLITS` that there is, images are in the only
    column of images, and labels in the column `label` or the only column of classes.
    """
    rows_of = _open(name, root, chosen["subset"])
    train = _first(name, rows_of, [chosen["train"]])
    test = _first(name, rows_of, [chosen["test"]] if chosen["test"] else TEST_SPLITS)
    image = chosen["image"] or _column(name, train, "image", "Image")
    label = chosen["label"] or _column(name, train, "label", "ClassLabel")
    for column in (image, label):
        if column not in train.column_names:
            raise DataFilesError(
                f"hf: {name} has no column {column!r}; there are: {', '.join(train.column_names)}"
            )
    fit: Fit = "squash" if side else "exact"
    if not side:
        side, height = train[0][image].size
        if side != height:
            raise DataFilesError(f"hf: images of {name} are not square: give an image size")
    splits = [_split(rows, image, label, side, fit, workers) for rows in (train, test)]
    classes = getattr(train.features[label], "num_classes", None) or int(splits[0].labels.max()) + 1
    empty = sorted(set(range(classes)) - set(splits[0].labels.tolist()))
    if empty:
        raise DataFilesError(f"hf: {name}: no training image of class {', '.join(map(str, empty))}")
    return Data(name, splits[0], splits[1], classes)


def _first(name: str, rows_of: Mapping[str, Any], wanted: Sequence[str]) -> Any:
    """Return the first of these splits that the data set has."""
    for split in wanted:
        if split in rows_of:
            return rows_of[split]
    raise DataFilesError(f"hf: {name} has no split {' or '.join(wanted)}")


def _split(rows: Any, image: str, label: str, side: int, fit: Fit, workers: int) -> FileSplit:
    from datasets import Image

    encoded = rows.select_columns([image]).cast_column(image, Image(decode=False))
    labels = np.asarray(rows.with_format("arrow")[label][:], dtype=np.int64)
    return FileSplit.of(
        ArrowImages(encoded, image), labels.tolist(), side, fit=fit, workers=workers
    )


def saved_folder(name: str, root: Path) -> Path | None:
    """Return the folder that `save_to_disk` wrote a data set into, if there is one."""
    for home in (Path(name).expanduser(), root / name):
        if (home / "dataset_dict.json").exists():
            return home
    return None


def _open(name: str, root: Path, subset: str) -> Mapping[str, Any]:
    with extra("data"):
        from datasets import DatasetDict, load_dataset

    saved = saved_folder(name, root)
    try:
        splits: Mapping[str, Any]
        if saved:
            splits = DatasetDict.load_from_disk(str(saved))
        else:
            splits = load_dataset(name, subset or None)
    except Exception as error:
        # the Hub cannot be reached, knows no such data set, or has another subset
        reason = " ".join(str(error).split()) or type(error).__name__
        what = "is not on this machine and cannot be downloaded"
        if isinstance(error, ValueError):
            what = "cannot be loaded"
        raise DataFilesError(f"hf: {name} {what}: {reason}") from None
    return splits


def _column(name: str, rows: Any, usual: str, kind: str) -> str:
    """Return the column of a kind; of several, the usual one."""
    columns = [
        column for column, feature in rows.features.items() if type(feature).__name__ == kind
    ]
    if usual in columns or (usual == "label" and usual in rows.column_names):
        return usual
    if len(columns) != 1:
        raise DataFilesError(
            f"hf: {name} has {len(columns)} columns of type {kind}; name one: {usual}=COLUMN"
        )
    return str(columns[0])
