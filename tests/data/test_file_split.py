"""A split whose images stay in files gives the same batches as one in memory, from any number of
processes.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedbn_flwr.client.batch_plan import BatchLoader, load_groups
from fedbn_flwr.data import Data, Split, load
from fedbn_flwr.data.file_split import FileSplit, ImageFiles
from fedbn_flwr.data.pixels import mapped, normalize
from tests.helpers.checkout import ROOT, environment
from tests.helpers.checkout import run as run_program
from tests.helpers.image_sets import paint

COUNT, SIDE = 13, 8
AUGMENTATIONS = ["none", "crop-flip", "resized-crop-flip", "flip-rotate:degrees=45", "random-crop"]


@pytest.fixture
def files(tmp_path: Path) -> FileSplit:
    """Images of 20 x 16 pixels, which are used at 8 x 8."""
    names = [paint(tmp_path / f"{number}.png", number, (20, 16)).name for number in range(COUNT)]
    return FileSplit.of(
        ImageFiles(tmp_path, names), [number % 3 for number in range(COUNT)], SIDE, workers=0
    )


def in_memory(split: FileSplit, folder: Path) -> Split:
    """The same images, decoded and scaled one after another by Pillow alone."""
    arrays = [
        np.asarray(
            Image.open(folder / f"{number}.png").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        )
        for number in range(COUNT)
    ]
    inputs = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    return Split(inputs, split.labels, mean=split.mean, std=split.std)


def loader(split: Split, augmentation: str = "none", seed: int = 0) -> BatchLoader:
    samples = torch.tensor([4, 1, 1, 12, 0, 7, 3, 9])
    return BatchLoader(
        split,
        torch.device("cpu"),
        augmentation,
        samples,
        [3, 2, 3],
        torch.Generator().manual_seed(seed),
    )


def same(ones: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> bool:
    assert len(ones) == len(others)
    return all(
        torch.equal(mine, yours)
        for one, other in zip(ones, others, strict=True)
        for mine, yours in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("augmentation", ["none", "crop-flip:padding=2", "flip-rotate:degrees=45"])
def test_batches_are_those_of_the_images_in_memory(
    files: FileSplit, tmp_path: Path, augmentation: str
) -> None:
    data = Data("files", files, files, 3).standardized()
    memory = in_memory(files, tmp_path)
    whole = Data("memory", memory, memory, 3).standardized()
    assert data.train.mean == whole.train.mean  # measured on all images where there are few
    assert data.train.std == whole.train.std
    assert same(list(loader(data.train, augmentation)), list(loader(whole.train, augmentation)))
    some = torch.tensor([2, 2, 11])
    assert same([data.train.batch(some)], [whole.train.batch(some)])


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_the_number_of_processes_changes_no_bit(files: FileSplit, augmentation: str) -> None:
    before = torch.get_rng_state()
    wanted = list(loader(files, augmentation))
    for workers in (1, 2):
        assert same(list(loader(replace(files, workers=workers), augmentation)), wanted)
    assert same(list(loader(files, augmentation, seed=1)), wanted) == (augmentation == "none")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("kind", ["files", "memory"])
def test_clients_that_load_together_get_what_each_gets_alone(
    files: FileSplit, tmp_path: Path, augmentation: str, kind: str
) -> None:
    split = files if kind == "files" else in_memory(files, tmp_path)
    alone = [list(loader(split, augmentation, seed)) for seed in range(2)]
    loaders = [loader(split, augmentation, seed) for seed in range(2)]
    groups = [([0, 1], step) for step in range(3)]
    for step, (inputs, targets) in enumerate(load_groups(loaders, groups)):
        sizes = [len(own[step][1]) for own in alone]
        augmented = [
            each.augmented(part) for each, part in zip(loaders, inputs.split(sizes), strict=True)
        ]
        assert same(
            list(zip(augmented, targets.split(sizes), strict=True)), [own[step] for own in alone]
        )


def test_clients_with_splits_of_their_own_load_together_too(files: FileSplit) -> None:
    apart = [
        loader(split, "flip-rotate", seed)
        for seed, split in enumerate((files, replace(files, workers=0)))
    ]
    alone = [list(loader(files, "flip-rotate", seed)) for seed in range(2)]
    loaded = list(load_groups(apart, [([1], 0), ([0], 0), ([0, 1], 1)]))
    assert same(loaded[:2], [alone[1][0], alone[0][0]])
    assert torch.equal(loaded[2][0], torch.cat([alone[0][1][0], alone[1][1][0]]))


def test_a_stream_within_a_stream_is_decoded_by_the_process_itself(files: FileSplit) -> None:
    wanted, split = list(loader(files)), replace(files, workers=1)
    outer = iter(loader(split))
    first = next(outer)
    assert same(list(loader(split)), wanted)
    assert same([first, *outer], wanted)


def test_a_stream_that_is_left_halfway_leaves_nothing_behind(files: FileSplit) -> None:
    split = replace(files, workers=1)
    for _ in range(3):
        assert same([next(iter(loader(split)))], list(loader(files))[:1])
    assert same(list(loader(split)), list(loader(files)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_decoded_is_one_line(
    files: FileSplit, tmp_path: Path, workers: int
) -> None:
    path = tmp_path / "3.png"
    path.write_bytes(path.read_bytes()[:200])
    split = replace(files, workers=workers)
    with pytest.raises(ValueError, match=r"^\S*3\.png cannot be decoded: [^\n]+$"):
        list(loader(split))
    (tmp_path / "7.png").write_text("no image")
    with pytest.raises(
        ValueError, match=r"^\S*7\.png cannot be decoded: cannot identify image file[^\n]+$"
    ):
        list(loader(split))
    # the workers have not died of it
    assert len(list(split.batches(torch.tensor([0, 1]), [1, 1]))) == 2


def test_a_worker_that_dies_is_replaced(files: FileSplit) -> None:
    split = replace(files, workers=3)  # no other test has so many, and so they are new
    before = {child.pid for child in active_children()}
    wanted = list(loader(files))
    assert same(list(loader(split)), wanted)
    worker = next(child for child in active_children() if child.pid not in before)
    assert worker.pid is not None
    os.kill(worker.pid, 9)
    worker.join()
    # until the pool has noticed: before, its other workers do the work
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        list(chain.from_iterable(loader(split) for _ in range(1000)))
    assert same(list(loader(split)), wanted)


def test_select_resize_and_pickle(files: FileSplit) -> None:
    chosen = files.select(np.array([5, 2]))
    assert same([chosen.batch(torch.tensor([1]))], [files.batch(torch.tensor([2]))])
    assert chosen.labels.tolist() == [2, 2]
    small = Data("files", files, files, 3).resized(4)
    assert small.image_size == 4
    assert small.train.batch(torch.tensor([0]))[0].shape == (1, 3, 4, 4)
    again = pickle.loads(pickle.dumps(files))
    assert same([again.batch(torch.tensor([3, 4]))], [files.batch(torch.tensor([3, 4]))])


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (1, 1, 1, 1), (0, 3, 4, 4)])
def test_memory_of_its_own_is_a_tensor_like_others(shape: tuple[int, ...]) -> None:
    apart = mapped(shape)
    assert torch.equal(apart, torch.zeros(shape))
    pixels = torch.randint(256, shape, dtype=torch.uint8)
    assert torch.equal(normalize(pixels, (), (), into=apart), pixels / 255)
    assert torch.equal(apart, pixels / 255)


HELD = r"""
import re, sys
import torch
from fedbn_flwr.data import files, load
files.MOST_IN_MEMORY = int(sys.argv[2])
def held():  # without pages of libraries, of which the system maps as many as it likes
    sizes = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", open("/proc/self/status").read())
    return sum(map(int, sizes)) / 1024
import PIL.Image, torchvision.datasets.folder
before = held()
data = load("folder:" + sys.argv[1], image_workers=int(sys.argv[3]))
most, order = held(), torch.arange(len(data.train))
for inputs, targets in data.train.batches(order, [10] * (len(order) // 10)):
    most = max(most, held())
    assert inputs.shape == (10, 3, 448, 448)
print(most - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_batches_and_not_by_the_data(tmp_path: Path) -> None:
    """500 images of 448 x 448 pixels take 301 MB decoded.

    A batch of ten takes 6 MB, as floats 24.
    """
    for number in range(500):
        paint(tmp_path / "train" / "a" / f"{number}.png", grey=number % 256, size=(448, 448))
    paint(tmp_path / "test" / "a" / "0.png", grey=0, size=(448, 448))

    def grown(most: int, workers: int) -> float:
        words = [sys.executable, "-c", HELD, str(tmp_path), str(most), str(workers)]
        return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert grown(2**29, 0) > 301
    for workers in (0, 2):
        assert grown(0, workers) < 150


def test_a_folder_of_many_pixels_stays_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        paint(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", number)
        paint(tmp_path / "test" / "ab"[number % 2] / f"{number}.png", 10 + number)
    whole = load(f"folder:{tmp_path}")
    monkeypatch.setattr("fedbn_flwr.data.files.MOST_IN_MEMORY", 8 * 8 * 8 * 3 - 1)
    streamed = load(f"folder:{tmp_path}", image_workers=1)
    assert isinstance(streamed.train, FileSplit)
    assert not isinstance(whole.train, FileSplit)
    assert streamed.train.workers == 1
    everything = torch.arange(4)
    for one, other in ((whole.train, streamed.train), (whole.test, streamed.test)):
        assert same([one.batch(everything)], [other.batch(everything)])


#: a script without a guard, with the way to start processes that Python 3.14 has
SCRIPT = """
import multiprocessing, sys
import torch
from fedbn_flwr.data import files, load
multiprocessing.set_start_method("forkserver")
files.MOST_IN_MEMORY = 0
train = load("folder:" + sys.argv[1], image_workers=1).train
print([len(inputs) for inputs, _ in train.batches(torch.arange(len(train)), [1, 1])])
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_for_processes_that_decode(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number in range(2):
            paint(tmp_path / split / "a" / f"{number}.png", number)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    printed = run_program(sys.executable, script, tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert printed == "[1, 1]\n"
