"""Images per second from JPEG files: this project's loader beside torchvision's `ImageFolder` and
torch's `DataLoader`.

    python -m benchmarks.image_loading make FOLDER --images 200000
    python -m benchmarks.image_loading load FOLDER
    python -m benchmarks.image_loading train FOLDER --rounds 20 --clients 100

`make` writes a synthetic set in ImageNet's layout, of 1,000 classes. `load` decodes random training
batches with both loaders in turn, at the same size, with the same number of workers and the same
augmentation. `train` runs a federated simulation on it in a process of its own, and tells its peak
memory with that of its workers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.memory import family, held
from fedbn_flwr.client.batch_plan import BatchLoader
from fedbn_flwr.data import load

CLASSES = 1000
BATCH = 20


def make(folder: Path, images: int, width: int, height: int) -> None:
    """Write `train/CLASS` and `val/CLASS`: blurred noise in a colour of the class."""
    generator = np.random.default_rng(0)
    colours = generator.integers(60, 196, (CLASSES, 3))
    for role, count in (("train", images), ("val", max(images // 50, CLASSES))):
        for number in range(count):
            label = number % CLASSES
            home = folder / role / f"n{label:08d}"
            home.mkdir(parents=True, exist_ok=True)
            noise = generator.normal(0, 40, (height // 8, width // 8, 3)) + colours[label]
            small = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
            small.resize((width, height), Image.Resampling.BICUBIC).save(
                home / f"{number}.JPEG", quality=85
            )


def compare(
    folder: Path, side: int, batches: int, workers: int, turns: int
) -> dict[str, list[float]]:
    """Return images per second of each loader, a number a turn."""
    loaders = {
        "imagefolder": _image_folder(folder, side, batches, workers),
        "this": _ours(folder, side, batches, workers),
    }
    speeds: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(turns + 1):
        for name, begin in loaders.items():
            start = time.perf_counter()
            count = sum(len(targets) for _, targets in begin())
            if turn:  # in the first one workers start and files come into the system's cache
                speeds[name].append(count / (time.perf_counter() - start))
    return speeds


Begin = Callable[[], Iterable[tuple[Tensor, Tensor]]]


def _ours(folder: Path, side: int, batches: int, workers: int) -> Begin:
    split = load(f"imagenet:{folder}", image_size=side, image_workers=workers).train

    def begin() -> Iterable[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        samples = torch.randint(len(split), (batches * BATCH,), generator=generator)
        return BatchLoader(
            split, torch.device("cpu"), "resized-crop-flip", samples, [BATCH] * batches, generator
        )

    return begin


def _image_folder(folder: Path, side: int, batches: int, workers: int) -> Begin:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [
        v2.RandomResizedCrop(side),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    dataset = ImageFolder(folder / "train", v2.Compose(steps))
    loader = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: islice(loader, batches)


def train(folder: Path, options: Sequence[str], side: int) -> dict[str, float]:
    """Run a simulation on the images and return its seconds and the peak memory of all its
    processes, in MiB.

    They are looked at five times a second. Pages that several processes share count once.
    """
    program = "import sys; from fedbn_flwr.deployment.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", "--dataset", f"imagenet:{folder}"]
    start, kilobytes = time.perf_counter(), 0
    process = subprocess.Popen([*command, "--image-size", str(side), *options])
    while process.poll() is None:
        kilobytes = max(
            kilobytes, sum(held(member).get("Pss", 0) for member in family(process.pid))
        )
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    return {"seconds": time.perf_counter() - start, "peak-mb": kilobytes / 1024}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the set, compare the loaders or run the simulation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("make", "load", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=200_000, help="training images to make")
    parser.add_argument(
        "--pixels", type=int, nargs=2, default=(96, 72), help="width and height of images to make"
    )
    parser.add_argument("--side", type=int, default=64, help="image size to load")
    parser.add_argument("--batches", type=int, default=200, help="batches a turn")
    parser.add_argument("--decoders", type=int, default=2, help="processes that decode")
    parser.add_argument("--turns", type=int, default=5)
    given, rest = parser.parse_known_args(arguments)
    torch.set_num_threads(1)
    if given.what == "make":
        make(given.folder, given.images, *given.pixels)
    elif given.what == "load":
        speeds = compare(given.folder, given.side, given.batches, given.decoders, given.turns)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        print(json.dumps({"images-per-second": medians, "turns": speeds}, indent=2))
    else:
        print(json.dumps(train(given.folder, rest, given.side), indent=2))


if __name__ == "__main__":
    main()
