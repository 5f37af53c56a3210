"""The papers' data sets, from tiny files in the format in which each is published."""

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedbn_flwr.data import Data, load, partition
from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.data.file_split import FileSplit
from fedbn_flwr.data.sets.fedbn_archives import DOMAINNET, OFFICE, Lists
from fedbn_flwr.deployment.cli import main
from tests.helpers.image_sets import (
    WRITERS,
    paint,
    write_cityscapes,
    write_digits_archive,
    write_domain_lists,
    write_imagenet,
    write_tiny_imagenet,
)


def unnormalized(data: Data, index: int) -> torch.Tensor:
    """One training image as bytes, 3 x H x W."""
    inputs, _ = data.train.batch(torch.tensor([index]))
    mean, std = (
        torch.tensor(values).view(-1, 1, 1) for values in (data.train.mean, data.train.std)
    )
    return ((inputs[0] * std + mean) * 255).round().to(torch.uint8)


def test_imagenet(tmp_path: Path) -> None:
    home = write_imagenet(tmp_path / "imagenet")
    data = load("imagenet", root=tmp_path, image_size=7)
    assert isinstance(data.train, FileSplit)
    assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (12, 6, 3, 7)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.train.mean == (0.485, 0.456, 0.406)
    # 16 x 12 pixels become 11 x 8, of which the middle 7 x 7 stay: PyTorch's Resize(8) and
    # CenterCrop(7)
    with Image.open(home / "train" / "n00000001" / "n00000001_2.JPEG") as image:
        wanted = np.asarray(image.resize((11, 8), Image.Resampling.BILINEAR))[0:7, 2:9]
    assert np.array_equal(unnormalized(data, 6).permute(1, 2, 0).numpy(), wanted)
    assert load(f"imagenet:{home}").image_size == 224


def test_imagenet_as_in_kaggles_archive(tmp_path: Path) -> None:
    inner = write_imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC")
    rows = ["ImageId,PredictionString"]
    for image in sorted((inner / "val").rglob("*.JPEG")):
        rows.append(f"{image.stem},{image.parent.name} 1 2 3 4 {image.parent.name} 5 6 7 8")
        image.rename(inner / "val" / image.name)
    for folder in [path for path in (inner / "val").iterdir() if path.is_dir()]:
        folder.rmdir()
    with pytest.raises(
        ValueError,
        match=r"^\S*LOC_val_solution\.csv is missing: the classes of the images in \S*val$",
    ):
        load(f"imagenet:{tmp_path}")
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    data = load(f"imagenet:{tmp_path}", image_size=8)
    assert data.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert len(data.train) == 12


def test_tiny_imagenet(tmp_path: Path) -> None:
    home = write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    data = load("tiny-imagenet", root=tmp_path)
    assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (6, 2, 2, 64)
    # the names are n00000009 and n00000008, so that the first in the list has the label 1
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [1, 0]
    with Image.open(home / "train" / "n00000008" / "images" / "n00000008_1.JPEG") as image:
        assert np.array_equal(unnormalized(data, 1).permute(1, 2, 0).numpy(), np.asarray(image))


@pytest.mark.parametrize("chosen", [OFFICE, DOMAINNET], ids=["office", "domainnet"])
def test_fedbns_lists(tmp_path: Path, chosen: Lists) -> None:
    home = write_domain_lists(tmp_path, chosen)
    data = load(chosen.name, root=tmp_path)
    domains = len(chosen.domains)
    assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (
        20 * domains,
        10 * domains,
        10,
        256,
    )
    assert data.domain_names == chosen.domains
    assert data.train.domains is not None
    assert data.train.domains.tolist() == [number for number in range(domains) for _ in range(20)]
    assert data.train.labels.tolist() == [label for label in range(10) for _ in range(2)] * domains
    inputs, _ = data.train.batch(torch.tensor([3]))
    assert 0 <= float(inputs.min()) < float(inputs.max()) <= 1  # not normalized
    first = load(f"{chosen.name}:{home}:samples=4", image_size=16)
    assert first.train.domains is not None
    assert torch.bincount(first.train.domains).tolist() == [4] * domains
    assert len(first.test) == 10 * domains
    assert [len(part) for part in partition("domain:1", data, domains, 0)] == [20] * domains


def test_digits_five_from_fedbns_archive(tmp_path: Path) -> None:
    write_digits_archive(tmp_path / "digits-five")
    data = load("digits-five", root=tmp_path)
    assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (250, 50, 10, 28)
    assert data.domain_names == ("mnist", "svhn", "usps", "synth", "mnist-m")
    with (tmp_path / "digits-five" / "MNIST" / "partitions" / "train_part1.pkl").open("rb") as file:
        images, labels = pickle.load(file)
    assert np.array_equal(data.train.inputs[7, 1].numpy(), images[2])  # one channel becomes three
    assert data.train.labels[5:10].tolist() == labels.tolist()
    with (tmp_path / "digits-five" / "MNIST_M" / "test.pkl").open("rb") as file:
        images, _ = pickle.load(file)
    assert np.array_equal(data.test.inputs[45].permute(1, 2, 0).numpy(), images[5])
    assert data.test.labels.tolist() == list(range(10)) * 5
    assert data.train.mean == data.train.std == (0.5, 0.5, 0.5)
    few = load(f"digits-five:{tmp_path / 'digits-five'}:samples=30")
    assert (len(few.train), len(few.test)) == (150, 50)


def test_cityscapes(tmp_path: Path) -> None:
    write_cityscapes(tmp_path / "cityscapes")
    data = load("cityscapes", root=tmp_path, image_size=32)
    assert (len(data.train), len(data.test), data.num_classes) == (3, 2, 19)
    assert data.domain_names == ("aachen", "bochum", "frankfurt")
    inputs, maps = data.train.batch(torch.tensor([2, 0]))
    assert inputs.shape == (2, 3, 32, 32)
    # the middle 32 columns of 64: 16 of the value 7, the class 0, and 16 of the value 33, the class
    # 18
    assert torch.equal(maps, torch.tensor([0] * 16 + [18] * 16).expand(2, 32, 32))
    inputs, maps = data.test.batch(torch.tensor([0]))
    assert inputs.shape == (1, 3, 1024, 2048)
    assert maps.shape == (1, 1024, 2048)
    assert maps.unique().tolist() == [IGNORED, 0, 18]
    assert [part.tolist() for part in partition("city", data, 2, 0)] == [[0, 1], [2]]
    assert [part.tolist() for part in partition("domain:1", data, 2, 0)] == [[0, 1], [2]]
    with pytest.raises(ValueError, match="2 domains with 1 each need 2 clients, not 3"):
        partition("city", data, 3, 0)


def test_a_random_crop_cuts_image_and_label_map_at_the_same_place(tmp_path: Path) -> None:
    from fedbn_flwr.data.augmentation import Edits, RandomCrop

    home = write_cityscapes(tmp_path)
    for path in (home / "leftImg8bit").rglob("*.png"):
        pixels = np.zeros((32, 64, 3), dtype=np.uint8)
        pixels[:, 32:] = 255
        Image.fromarray(pixels).save(path)
    data = load(f"cityscapes:{home}", image_size=24)
    seeds = torch.arange(40)
    ((inputs, maps),) = data.train.batches(
        torch.zeros(40, dtype=torch.int64), [40], edits=Edits(RandomCrop(), seeds)
    )
    right = inputs[:, 0] > 0
    known = maps != IGNORED
    assert torch.equal(right[known], maps[known] == 18)
    assert len({int(image.sum()) for image in right}) > 10  # at many places


def test_a_hugging_face_data_set(tmp_path: Path) -> None:
    import datasets

    pixels = [np.full((8, 8), 10 * number, dtype=np.uint8) for number in range(6)]
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    columns = {"img": [Image.fromarray(image) for image in pixels], "label": [0, 1, 0, 1, 1, 1]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    both = datasets.DatasetDict({"train": rows, "validation": rows.select([1, 0])})
    both.save_to_disk(str(tmp_path / "me" / "saved"))
    (tmp_path / "files").mkdir()
    for name, split in both.items():
        split.to_parquet(str(tmp_path / "files" / f"{name}.parquet"))
    specs = [
        "hf:me/saved",
        f"hf:{tmp_path / 'files'}",
        f"hf:{tmp_path / 'files'}:image=img:label=label:test=train",
    ]
    for spec, test in zip(specs, (2, 2, 6), strict=True):
        data = load(spec, root=tmp_path, image_workers=0)
        assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (
            6,
            test,
            2,
            8,
        )
        assert data.train.labels.tolist() == [0, 1, 0, 1, 1, 1]
        assert unnormalized(data, 4).unique().tolist() == [40]
    streamed = load("hf:me/saved", root=tmp_path, image_workers=2, image_size=4)
    assert [len(labels) for _, labels in streamed.train.batches(torch.arange(6), [4, 2])] == [4, 2]
    mistakes = {
        "hf:me/saved:test=valid": r"^hf: me/saved has no split valid$",
        "hf:me/saved:label=fine": r"^hf: me/saved has no column 'fine'; there are: img, label$",
        "hf:me/saved:config=a": r"^hf: unknown option 'config'; known: train, test, image, label, subset$",
        "hf:": "hf: needs a name",
    }
    for spec, message in mistakes.items():
        with pytest.raises(ValueError, match=message):
            load(spec, root=tmp_path)


#: data set, what is removed, the message
FAULTS = [
    ("imagenet", "val", r"val is missing: a folder of validation images"),
    ("imagenet", "train", r"train is missing: a folder of training images with a folder for"),
    ("imagenet", "train/n00000001/*", r"train/n00000001: no image of class n00000001"),
    ("tiny-imagenet", "wnids.txt", r"wnids.txt is missing: the names of the classes, one a line"),
    ("tiny-imagenet", "val/val_annotations.txt", r"val_annotations.txt is missing: file and"),
    ("tiny-imagenet", "train/n00000008/images/*", r"images: no image of class n00000008"),
    ("office-caltech-10", "dslr_test.pkl", r"dslr_test.pkl is missing: FedBN's list of test"),
    ("office-caltech-10", ".", r"office_caltech_10 is missing: the folder office_caltech_10 with"),
    ("digits-five", "SVHN/test.pkl", r"SVHN/test.pkl is missing: a test part of FedBN's"),
    ("cityscapes", "gtFine/val", r"gtFine/val is missing: a folder of label maps for each"),
    ("cityscapes", "gtFine/train/bochum/*", r"labelIds.png is missing: the label map of"),
    ("cityscapes", "leftImg8bit/train/bochum/*", r"bochum: no image of city bochum"),
]


@pytest.mark.parametrize(("name", "gone", "message"), FAULTS)
def test_what_is_missing_is_one_line(tmp_path: Path, name: str, gone: str, message: str) -> None:
    home = WRITERS[name](tmp_path)
    load(name, root=tmp_path, image_size=9)
    for path in [home] if gone == "." else list(home.glob(gone)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=message) as error:
        load(name, root=tmp_path, image_size=10)
    assert "\n" not in str(error.value)


def test_a_label_map_with_colours_is_named(tmp_path: Path) -> None:
    colours = next((write_cityscapes(tmp_path / "cityscapes") / "gtFine" / "train").rglob("*.png"))
    paint(colours, 0, (64, 32))
    train = load("cityscapes", root=tmp_path, image_size=9).train
    with pytest.raises(ValueError, match=f"^{colours} is not a label map: it has colours$"):
        train.batch(torch.arange(len(train)))


@pytest.mark.parametrize("module", ["scipy.io", "torchvision"])
def test_a_missing_package_is_not_taken_for_missing_files(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "torchvision.datasets.svhn.check_integrity", lambda path, md5=None: os.path.isfile(path)
    )
    for role in ("train", "test"):
        (tmp_path / f"{role}_32x32.mat").touch()
    monkeypatch.setitem(sys.modules, module, None)
    assert (
        main(["run", "--dataset=svhn", f"--data-root={tmp_path}", f"--results-dir={tmp_path}"]) == 2
    )
    line = (
        f"fedbn-flwr: {module.partition('.')[0]} is not installed: pip install '.[data]' in "
        "the clone"
    )
    assert capsys.readouterr().err.splitlines() == [line]


WEBCAM = [f"{OFFICE.folder}/webcam/{name}/train_0.jpg" for name in OFFICE.classes]
MUG = OFFICE.classes.index("mug")


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        (
            "office-caltech-10",
            "webcam_train.pkl",
            (WEBCAM[:MUG] + WEBCAM[MUG + 1 :], [name for name in OFFICE.classes if name != "mug"]),
            r"^\S*webcam_train.pkl: no image of class mug$",
        ),
        (
            "office-caltech-10",
            "webcam_train.pkl",
            (WEBCAM, ["cup"] * 10),
            r"webcam_train.pkl has the unknown class 'cup'; there are: back_pack",
        ),
        (
            "office-caltech-10",
            "webcam_train.pkl",
            (WEBCAM, OFFICE.classes[:-1]),
            r"webcam_train.pkl has 10 images and 9 labels",
        ),
        (
            "digits-five",
            "USPS/test.pkl",
            (np.zeros((9, 16, 16), dtype=np.uint8), np.arange(9)),
            r"^digits-five: no test image of class 9 in usps$",
        ),
    ],
)
def test_a_list_that_cannot_be_used_is_one_line(
    tmp_path: Path, name: str, file: str, content: object, message: str
) -> None:
    (WRITERS[name](tmp_path) / file).write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=message):
        load(name, root=tmp_path)


class Harmful:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (os.environ["HARM"],)


def test_a_pickle_file_can_only_hold_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    path = WRITERS["digits-five"](tmp_path) / "USPS" / "test.pkl"
    path.write_bytes(pickle.dumps((Harmful(), [1])))
    with pytest.raises(
        ValueError,
        match=r"test.pkl is not a pickle file of images and labels: it asks for posix.mkdir",
    ):
        load("digits-five", root=tmp_path)
    assert not (tmp_path / "harm").exists()
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"test.pkl is not a pickle file of images and labels: "):
        load("digits-five", root=tmp_path)
