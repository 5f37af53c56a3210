"""Data sets in files, from tiny files in each data set's own format on disk."""

import bz2
import gzip
import os
import pickle
import shutil
import struct
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from fedbn_flwr.data import load
from fedbn_flwr.data.files import list_folder
from fedbn_flwr.data.loading import forget
from fedbn_flwr.data.sets import mnist
from fedbn_flwr.experiments import resolve
from tests.helpers.image_sets import paint

Pixels = NDArray[np.uint8]


def pixels(count: int, *shape: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches the network, and a tiny file passes for the real one, whose checksum it
    cannot have.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise urllib.error.URLError("no network")

    def exists(path: str, md5: str | None = None) -> bool:
        return os.path.isfile(path)

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setitem(mnist.FOLDERS, "fashion-mnist", ("FashionMNIST", None))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", exists)
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", exists)


CIFAR10 = {f"data_batch_{number}": 2 for number in range(1, 6)} | {"test_batch": 3}


def write_cifar(home: Path, files: dict[str, int], key: str, meta: str, names: str) -> None:
    home.mkdir(parents=True)
    for number, (name, count) in enumerate(files.items()):
        labels = [(3 * number + position) % 10 for position in range(count)]
        entry = {"data": pixels(count, 3 * 32 * 32, seed=number), key: labels}
        (home / name).write_bytes(pickle.dumps(entry))
    (home / meta).write_bytes(pickle.dumps({names: [f"class {number}" for number in range(10)]}))


@pytest.mark.parametrize(
    ("name", "folder", "files", "keys", "classes"),
    [
        ("cifar10", "cifar-10-batches-py", CIFAR10, ("labels", "batches.meta", "label_names"), 10),
        (
            "cifar100",
            "cifar-100-python",
            {"train": 12, "test": 4},
            ("fine_labels", "meta", "fine_label_names"),
            100,
        ),
    ],
)
def test_cifar(
    tmp_path: Path,
    name: str,
    folder: str,
    files: dict[str, int],
    keys: tuple[str, str, str],
    classes: int,
) -> None:
    write_cifar(tmp_path / folder, files, *keys)
    data = load(name, root=str(tmp_path))
    *train, test = files.values()
    assert (len(data.train), len(data.test), data.num_classes) == (sum(train), test, classes)
    # one file after another, stored channels first
    expected = [
        pixels(count, 3, 32, 32, seed=number) for number, count in enumerate(files.values())
    ]
    assert np.array_equal(data.train.inputs.numpy(), np.concatenate(expected[:-1]))
    assert np.array_equal(data.test.inputs.numpy(), expected[-1])
    assert data.train.labels[:4].tolist() == ([0, 1, 3, 4] if train[0] == 2 else [0, 1, 2, 3])


def write_idx(home: Path, packed: bool = False) -> None:
    """Write the four files of MNIST: six images for training, four for testing."""
    home.mkdir(parents=True, exist_ok=True)
    for role, count in (("train", 6), ("t10k", 4)):
        images = (
            struct.pack(">4i", 2051, count, 28, 28) + pixels(count, 28, 28, seed=count).tobytes()
        )
        labels = struct.pack(">2i", 2049, count) + bytes(range(count))
        for name, content in (
            (f"{role}-images-idx3-ubyte", images),
            (f"{role}-labels-idx1-ubyte", labels),
        ):
            if packed:
                (home / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (home / name).write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("mnist", "."),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "package of Debian"),
    ],
)
def test_mnist_and_fashion_mnist_as_they_lie(
    tmp_path: Path, name: str, folder: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        mnist.FOLDERS, "fashion-mnist", ("FashionMNIST", tmp_path / "package of Debian")
    )
    write_idx(tmp_path / folder, packed)
    data = load(name, root=tmp_path)
    assert (data.train.inputs.shape, data.train.inputs.dtype) == ((6, 1, 28, 28), torch.uint8)
    assert np.array_equal(data.test.inputs[:, 0].numpy(), pixels(4, 28, 28, seed=4))
    assert data.train.labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_path_names_where_a_published_set_is_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        mnist.FOLDERS, "fashion-mnist", ("FashionMNIST", tmp_path / "package of Debian")
    )
    write_idx(tmp_path / "here")
    write_idx(tmp_path / "package of Debian")
    data = load(f"fashion-mnist:{tmp_path}/here", root=tmp_path / "elsewhere")
    assert np.array_equal(data.train.inputs[:, 0].numpy(), pixels(6, 28, 28, seed=6))
    assert load(f"fashion-domains:{tmp_path}/here").name == "fashion-domains"
    write_cifar(
        tmp_path / "small" / "cifar-10-batches-py", CIFAR10, "labels", "batches.meta", "label_names"
    )
    assert len(load(f"cifar10:{tmp_path}/small").test) == 3
    for name in ("fashion-mnist", "fashion-domains", "cifar10"):
        with pytest.raises(FileNotFoundError, match=r" is not in \S*nowhere\S* .*or broken: "):
            load(f"{name}:{tmp_path}/nowhere")


def test_fashion_mnist_in_four_domains(tmp_path: Path) -> None:
    write_idx(tmp_path / "FashionMNIST" / "raw")
    data = load("fashion-domains", root=tmp_path)
    assert (data.name, data.num_classes) == ("fashion-domains", 10)
    assert data.domain_names == ("real", "photos", "inverted", "sheared")
    for split, count, labels, domains in (
        (data.train, 6, [0, 4, 1, 5, 2, 3], [0, 0, 1, 1, 2, 3]),
        (data.test, 4, [0, 1, 2, 3], [0, 1, 2, 3]),
    ):
        assert split.domains is not None
        assert split.labels.tolist() == labels
        assert split.domains.tolist() == domains
        real = split.inputs[split.domains == 0]
        assert np.array_equal(
            real.numpy(), pixels(count, 28, 28, seed=count)[::4, None].repeat(3, axis=1)
        )


CANNOT = r"^\S*train-images-idx3-ubyte.gz cannot be read: "
BROKEN: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut": (
        "train-images-idx3-ubyte",
        lambda content: content[:-1],
        "is not a whole IDX file of bytes with 3 dim",
    ),
    "no header": (
        "t10k-labels-idx1-ubyte",
        lambda _: b"",
        "is not a whole IDX file of bytes with 1 dimension$",
    ),
    "labels of others": (
        "train-labels-idx1-ubyte",
        lambda content: content[:4] + struct.pack(">i", 5) + content[8:13],
        "the train split has 6 images and 5 labels",
    ),
    "a cut archive": ("train-images-idx3-ubyte.gz", lambda content: content[:-9], CANNOT),
    "no archive": ("train-images-idx3-ubyte.gz", lambda _: b"no archive", CANNOT),
}


@pytest.mark.parametrize(("file", "damage", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_of_mnist(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_idx(tmp_path, packed=file.endswith(".gz"))
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(ValueError, match=message):
        load("mnist", root=tmp_path)


def test_svhn(tmp_path: Path) -> None:
    for role, count in (("train", 5), ("test", 3)):
        # the samples are last on disk
        images = pixels(count, 32, 32, 3, seed=count).transpose(1, 2, 3, 0)
        labels = np.array([[10], [1], [9], [2], [3]][:count], dtype=np.uint8)
        scipy.io.savemat(tmp_path / f"{role}_32x32.mat", {"X": images, "y": labels})
    data = load("svhn", root=tmp_path)
    assert data.train.inputs.shape == (5, 3, 32, 32)
    assert data.train.inputs.is_contiguous()
    assert np.array_equal(
        data.test.inputs.numpy(), pixels(3, 32, 32, 3, seed=3).transpose(0, 3, 1, 2)
    )
    assert data.train.labels.tolist() == [0, 1, 9, 2, 3]  # on disk the digit 0 is called 10


def test_usps(tmp_path: Path) -> None:
    for name, labels in (("usps.bz2", [1, 10, 4]), ("usps.t.bz2", [2, 3])):
        values = " ".join(f"{position + 1}:{-1 if position % 2 else 1}" for position in range(256))
        text = "".join(f"{label} {values} \n" for label in labels)
        (tmp_path / name).write_bytes(bz2.compress(text.encode()))
    data = load("usps", root=tmp_path)
    assert data.train.inputs.shape == (3, 1, 16, 16)
    assert data.train.inputs[0, 0, 0, :4].tolist() == [255, 0, 255, 0]
    assert data.train.labels.tolist() == [0, 9, 3]
    assert load("usps", root=tmp_path, image_size=28).image_size == 28


ABSENT: dict[str, Exception] = {
    **dict.fromkeys(("cifar10", "cifar100", "mnist"), urllib.error.URLError("no route")),
    "fashion-mnist": IncompleteRead(b""),
    "svhn": OSError(28, "full"),
    "usps": EOFError(),
}


@pytest.mark.parametrize("name", ABSENT)
def test_absent_data_are_one_line_that_names_the_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ABSENT[name]

    monkeypatch.setattr("urllib.request.urlopen", fail)
    with pytest.raises(FileNotFoundError) as error:
        load(name, root=tmp_path)
    message = str(error.value)
    assert message.startswith(f"{name} is not in {tmp_path}")
    assert ", and cannot be downloaded: " in message
    assert "\n" not in message


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "usps.bz2").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=f"^the files of usps in {tmp_path} are damaged: Invalid"):
        load("usps", root=tmp_path)
    (tmp_path / "usps.bz2").unlink()
    (tmp_path / "usps.bz2").mkdir()
    with pytest.raises(IsADirectoryError, match=r"usps\.bz2"):
        load("usps", root=tmp_path)


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBN_FLWR_DATA", str(tmp_path / "mine"))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "mine")):
        load("usps")
    monkeypatch.delenv("FEDBN_FLWR_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / ".cache" / "fedbn-flwr")):
        load("usps")


@pytest.fixture
def fill(tmp_path: Path) -> Callable[[str], None]:
    """Make a data set of two classes in a folder: three training images, one for testing."""

    def make(home: str) -> None:
        paint(tmp_path / home / "train" / "cat" / "a.png", size=(4, 4), grey=10)
        paint(tmp_path / home / "train" / "dog" / "a.png", size=(4, 4), grey=20)
        paint(tmp_path / home / "train" / "dog" / "b.png", size=(4, 4), grey=30)
        paint(tmp_path / home / "test" / "dog" / "a.png", size=(4, 4), grey=40)

    return make


def test_a_folder_of_images_per_class(tmp_path: Path, fill: Callable[[str], None]) -> None:
    fill("")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    data = load(f"folder:{tmp_path}")
    assert (data.num_classes, data.in_channels, data.image_size) == (2, 3, 4)
    assert data.train.inputs[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.test.labels.tolist() == [1]  # though the test split has only one class
    assert data.domain_names == ()


def test_names_of_files_may_be_none_in_utf_8_but_not_those_of_classes(
    tmp_path: Path, fill: Callable[[str], None]
) -> None:
    fill("")
    folder = os.fsencode(tmp_path / "train" / "cat")
    os.rename(folder + b"/a.png", folder + b"/K\xf6ln.png")
    spec = f"folder:{tmp_path}"
    assert load(spec).train.inputs[:, 0, 0, 0].tolist() == [10, 20, 30]
    run = resolve({"dataset": spec})
    assert run.files["dataset"]
    os.rename(folder, os.fsencode(tmp_path) + b"/train/K\xf6ln")
    forget()
    with pytest.raises(ValueError, match=r"name of the folder 'K\\udcf6ln' is not UTF-8"):
        load(spec)


def test_links_are_followed_but_not_back_into_their_own_folder(
    tmp_path: Path, fill: Callable[[str], None]
) -> None:
    fill("")
    paint(tmp_path / "elsewhere" / "c.png", size=(4, 4), grey=50)
    links = {
        "more": tmp_path / "elsewhere",
        "here": Path("."),
        "above": Path(".."),
        "all": tmp_path,
        "beside": Path("../cat"),
    }
    for name, target in links.items():
        (tmp_path / "train" / "dog" / name).symlink_to(target)
    (tmp_path / "train" / "cat" / "beside").symlink_to("../dog")
    data = load(f"folder:{tmp_path}")
    # each class has the other one's, too, which link back to its own
    assert sorted(data.train.inputs[:, 0, 0, 0].tolist()) == [10, 10, 20, 20, 30, 30, 50, 50]


def test_a_folder_of_domains(tmp_path: Path, fill: Callable[[str], None]) -> None:
    fill("sketch")
    alone = load(f"folder:{tmp_path}")
    assert (alone.domain_names, alone.train.domains) == ((), None)
    fill("photo")
    data = load(f"folder:{tmp_path}/.")
    assert data.domain_names == ("photo", "sketch")
    assert data.train.domains is not None
    assert data.train.domains.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.train.labels.tolist() == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_fifth_of_each_class_of_each_site_is_for_testing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    monkeypatch.setattr("fedbn_flwr.data.files.MOST_IN_MEMORY", 2**20 if in_memory else 1)
    for site, label, number in (
        (site, label, number) for site in "nm" for label in "ab" for number in range(10)
    ):
        paint(
            tmp_path / site / label / f"{number}.png",
            grey=100 * "nm".index(site) + 50 * "ab".index(label) + number,
        )
    data = load(f"folder:{tmp_path}", image_workers=0)
    assert (data.domain_names, data.class_names) == (("m", "n"), ("a", "b"))
    greys: list[list[int]] = []
    for split, count in ((data.train, 8), (data.test, 2)):
        assert split.domains is not None
        assert torch.bincount(2 * split.domains + split.labels).tolist() == [count] * 4
        inputs, _ = replace(split, mean=(), std=()).batch(torch.arange(len(split)))
        greys.append((inputs[:, 0, 0, 0] * 255).round().int().tolist())
        assert [grey // 50 for grey in greys[-1]] == (
            (1 - split.domains) * 2 + split.labels
        ).tolist()
    assert len({*greys[0], *greys[1]}) == 40


def test_the_images_for_testing_are_the_same_beside_other_sites_and_classes_and_alone(
    tmp_path: Path,
) -> None:
    def for_testing(path: Path) -> set[str]:
        (_, test), _, _ = list_folder(path)
        return {str(Path(test.path(row)).relative_to(tmp_path)) for row in range(len(test))}

    for site, label, number in (
        (site, label, number) for site in "mo" for label in "bd" for number in range(17)
    ):
        paint(
            tmp_path / site / label / (f"{number:02}/scan.png" if site == "m" else f"{number}.png"),
            grey=number,
        )
    before = for_testing(tmp_path)
    assert len(before) == 4 * 3
    assert {
        f"m/b/{number:02}/scan.png" for number in range(3)
    } - before  # not those that come first
    assert for_testing(tmp_path / "o") == {name for name in before if name.startswith("o/")}
    for site, label in (("a", "b"), ("m", "c"), ("n", "a"), ("z", "b")):
        paint(tmp_path / site / label / "0.png", grey=0)
        paint(tmp_path / site / label / "1.png", grey=0)
    assert {
        name for name in for_testing(tmp_path) if name[:3] in ("m/b", "m/d", "o/b", "o/d")
    } == before


def test_a_folder_of_single_images_is_refused(tmp_path: Path) -> None:
    for label in "ab":
        paint(tmp_path / label / "0.png", grey=0)
    with pytest.raises(ValueError, match="no class has two images, one of them for testing"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_of_16_bits_keep_all_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """As 12-bit X-rays: all values are far above 255, and far below the highest of 16 bits."""
    monkeypatch.setattr("fedbn_flwr.data.files.MOST_IN_MEMORY", 2**20 if in_memory else 1)
    deep = np.random.default_rng(0).integers(300, 4096, (4, 8, 8)).astype(np.uint16)
    for number, name in enumerate(
        ("train/a/0.png", "train/b/1.png", "test/a/2.png", "test/b/3.tif")
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(deep[number]).save(tmp_path / name)
    data = load(f"folder:{tmp_path}", image_workers=0)
    truth = deep / 65535
    assert data.train.mean == pytest.approx([truth[:2].mean()] * 3)
    assert data.train.std == pytest.approx([truth[:2].std()] * 3)
    for split, expected in ((data.train, truth[:2]), (data.test, truth[2:])):
        inputs, _ = split.batch(torch.arange(2))
        wanted = np.repeat((expected - truth[:2].mean())[:, None] / truth[:2].std(), 3, axis=1)
        assert np.allclose(inputs.numpy(), wanted, atol=1e-5)
    # one of 8 bits beside them: both are shares of white
    paint(tmp_path / "train/b/9.png", grey=51)
    mixed = load(f"folder:{tmp_path}/.", image_workers=0).train
    inputs, _ = replace(mixed, mean=(), std=()).batch(torch.arange(3))
    assert float(inputs[2].mean()) == pytest.approx(0.2)
    assert mixed.mean == pytest.approx([float(inputs.double().mean())] * 3)
    paint(tmp_path / "apart/train/a/0.png", grey=51, size=(8, 8))
    paint(tmp_path / "apart/train/b/0.png", grey=102, size=(8, 8))
    shutil.copytree(tmp_path / "test", tmp_path / "apart" / "test")
    # all of 8 bits for training, of 16 for testing
    apart = load(f"folder:{tmp_path / 'apart'}", image_workers=0)
    inputs, _ = replace(apart.test, mean=(), std=()).batch(torch.arange(2))
    assert np.allclose(inputs[:, 0].numpy(), truth[2:], atol=1e-5)
    assert apart.train.mean == pytest.approx([0.3] * 3)
    Image.fromarray(truth[0].astype(np.float32)).save(tmp_path / "train/b/10.tif")
    with pytest.raises(
        ValueError, match=r"10\.tif has pixels other than whole numbers from 0 to 65535"
    ):
        load(f"folder:{tmp_path}/./.", image_workers=0).train.batch(torch.arange(4))


def test_images_of_different_sizes_need_an_image_size(
    tmp_path: Path, fill: Callable[[str], None]
) -> None:
    fill("")
    paint(tmp_path / "train" / "dog" / "c.png", size=(7, 7), grey=50)
    with pytest.raises(ValueError, match=r"c\.png is not square or not of the size of the others"):
        load(f"folder:{tmp_path}")
    data = load(f"folder:{tmp_path}", image_size=6)
    assert data.image_size == 6
    assert data.train.inputs[:, 1, 3, 3].tolist() == [10, 20, 30, 50]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "found neither train/CLASS/ nor DOMAIN/train/CLASS/ nor DOMAIN/CLASS"),
        (("1.png",), "found neither train/CLASS/ nor DOMAIN/train/CLASS/ nor DOMAIN/CLASS"),
        (("train/a/1.png",), "beside train, there is neither test nor val"),
        (("train/a/1.png", "test/1.png"), "no image in .*test: names of images end in .jpg, .jpeg"),
        (("train/a/1.png", "test/b/1.png"), "has a class that no training folder has: b"),
    ],
)
def test_a_folder_that_lacks_images(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    (tmp_path / "home").mkdir()
    for file in files:
        paint(tmp_path / "home" / file)
    with pytest.raises(ValueError, match=message):
        load(f"folder:{tmp_path / 'home'}")


@pytest.mark.parametrize(("more", "count"), [((), 2), (("test/a/1.png",), 1)])
def test_val_is_for_testing_where_there_is_no_test(
    tmp_path: Path, more: tuple[str, ...], count: int
) -> None:
    for file in ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/a/2.png", *more):
        paint(tmp_path / file)
    assert len(load(f"folder:{tmp_path}").test.labels) == count


def test_images_are_those_that_torchvision_finds(tmp_path: Path) -> None:
    for name in (
        "b/2.png",
        "b/10.JPG",
        "b/sub/1.jpeg",
        "b/sub/0.webp",
        "a/x.tif",
        "a/.png",
        "b/notes.txt",
        "c/1.png",
    ):
        for home in ("train", "test"):
            (tmp_path / home / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / home / name).touch()
    expected = make_dataset(tmp_path / "train", {"a": 0, "b": 1, "c": 2}, IMG_EXTENSIONS)
    ((listed, _), _, _) = list_folder(tmp_path)
    assert [(listed.path(row), listed.labels[row]) for row in range(len(listed))] == expected
    (tmp_path / "train" / "a" / "._x.tif").touch()  # beside x.tif, when macOS copies it
    ((again, _), _, _) = list_folder(tmp_path)
    assert again.names == listed.names
