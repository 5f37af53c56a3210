"""Sites in this process: each has a folder of images, and is reached by the app that a SuperNode
starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from PIL import Image

from apps.client import app
from fedbn_flwr import data
from fedbn_flwr.data import Split
from fedbn_flwr.simulation.in_process import InProcessGrid

CLASSES = ("covid", "normal", "pneumonia")
SIDE = 8


def images(count: int, seed: int) -> Split:
    """Return random RGB images, a third of each class, whose class shifts their brightness."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(CLASSES)
    noise = torch.randint(0, 120, (count, 3, SIDE, SIDE), generator=generator)
    return Split((noise + 60 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)


def write_images(
    split: Split, folder: Path, chosen: Sequence[int], names: Sequence[str] = CLASSES
) -> None:
    """Write samples as `CLASS/NUMBER.png`, numbered as in the split."""
    for number in chosen:
        home = folder / names[int(split.labels[number])]
        home.mkdir(parents=True, exist_ok=True)
        pixels = split.inputs[number].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(home / f"{number:04d}.png")


def write_sites(folder: Path, partition: str, sites: int, seed: int) -> tuple[Path, list[Path]]:
    """Write images into one folder, and into one for each client of a partition.

    Returns the folder and the sites'.

    A site's test images are its share of all test images, in the order of their numbers.
    """
    train, test = images(48, 1), images(24, 2)
    whole = folder / "whole"
    write_images(train, whole / "train", range(len(train)))
    write_images(test, whole / "test", range(len(test)))
    # the folder has the images by class, and within a class by number
    order = sorted(range(len(train)), key=lambda number: (int(train.labels[number]), number))
    share = len(test) // sites
    folders = [folder / str(site) for site in range(sites)]
    parts = data.partition(partition, data.load(f"folder:{whole}"), sites, seed)
    for site, (home, rows) in enumerate(zip(folders, parts, strict=True)):
        for name in CLASSES:
            # a class of the test images needs a folder, which may be empty
            (home / "train" / name).mkdir(parents=True)
        write_images(train, home / "train", [order[row] for row in rows])
        write_images(test, home / "test", range(site * share, (site + 1) * share))
    return whole, folders


class SitesInProcess(InProcessGrid):
    """Runs the project's app for sites whose node configurations name their data."""

    def __init__(self, data: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(app, len(data), options)
        self.data = list(data)
        #: node configurations that differ from `partition-id`, `num-partitions` and `data`
        self.changed: dict[int, dict[str, Any]] = {}

    def _lend(self, node: int) -> Context:
        context = super()._lend(node)
        partition = int(context.node_config["partition-id"])
        data = {"data": self.data[partition]} if self.data[partition] else {}
        config = {**context.node_config, **data, **self.changed.get(partition, {})}
        return replace(context, run_id=self.run.run_id, node_config=config)
