"""A check of a data set's files before anything is trained: what is missing or broken."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedbn_flwr.data.decoding import Source, UnreadableImageError, read_image, read_map
from fedbn_flwr.data.file_split import FileSplit
from fedbn_flwr.data.loading import DATASETS, DatasetRequest
from fedbn_flwr.data.sets.catalog import CATALOG
from fedbn_flwr.data.splits import Data, Split
from fedbn_flwr.plugins import did_you_mean

#: images of a split that are decoded, unless more are asked for
IMAGES = 100


@dataclass(frozen=True)
class Finding:
    """One line of a check."""

    verdict: Literal["ok", "bad"]
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:4}{self.text}"


def check_dataset(name: str, path: str, images: int = IMAGES) -> Iterator[Finding]:
    """Check a data set in a folder: the lists of files, and `images` images of each split.

    With `images` of 0 all are decoded. An unknown name is a ValueError.
    """
    if name not in CATALOG:
        raise ValueError(f"data check: unknown data set {name!r}; {did_you_mean(name, CATALOG)}")
    home = Path(path).expanduser()
    try:
        data = DATASETS[name](DatasetRequest(name, path, None, home, image_workers=0))
    except (ValueError, OSError) as error:
        yield Finding("bad", " ".join(str(error).split()))
        return
    for role, split in (("train", data.train), ("test", data.test)):
        yield Finding("ok", f"{role}: {_describe(split, data)}")
        if isinstance(split, FileSplit):
            yield from _check_files(role, split, data, images)


def where_to_get(name: str) -> list[str]:
    """Return lines about the licence of a data set and where it is to be had."""
    published = CATALOG[name]
    return [f"licence: {published.licence}", *published.sources]


def _describe(split: Split, data: Data) -> str:
    counts = torch.bincount(split.labels, minlength=data.num_classes)
    text = f"{len(split)} images in {int((counts > 0).sum())} of {data.num_classes} classes"
    if data.task == "segmentation":
        text = f"{len(split)} images with label maps"
    if split.domains is None:
        return text
    shares = torch.bincount(split.domains, minlength=len(data.domain_names)).tolist()
    return f"{text}; " + ", ".join(f"{domain} {count}" for domain, count in zip(data.domain_names, shares, strict=True))


def _check_files(role: str, split: FileSplit, data: Data, most: int) -> Iterator[Finding]:
    """Decode images and label maps, `most` of each, evenly spaced; a class that none of all maps has is a fault."""
    count, seen = min(most or len(split), len(split)), set[int]()
    rows = split.rows[np.linspace(0, len(split) - 1, count).round().astype(np.int64)].numpy()

    def see(source: Source) -> None:
        assert split.classes is not None
        seen.update(split.classes[torch.from_numpy(read_map(source))].unique().tolist())

    for kind, files, read in (("images", split.images, read_image), ("label maps", split.maps, see)):
        broken = 0
        for source in files(rows) if files else ():
            try:
                read(source)
            except UnreadableImageError as error:
                broken += 1
                yield Finding("bad", str(error))
        if files and not broken:
            empty = [name for number, name in enumerate(data.class_names) if number not in seen]
            classes = f", with {len(data.class_names) - len(empty)} classes" if read is see else ""
            yield Finding("ok", f"{role}: {count} of {len(split)} {kind} decoded{classes}")
            if read is see and empty and count == len(split):
                yield Finding("bad", f"{role}: no pixel of class {', '.join(empty)}")
