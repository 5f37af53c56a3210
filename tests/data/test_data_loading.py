"""Specs name data sets; each is read once."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedbn_flwr.data import DATASETS, Data, Split, load, partition


def test_loading_twice_gives_the_same_object() -> None:
    assert load("digits") is load("digits", image_size=None, root=None)
    assert load("synthetic:n=100:test=50") is load("synthetic:n=100:test=50")
    assert load("digits", image_size=12) is load("digits", image_size=12)
    assert load("digits", image_size=12) is not load("digits")
    with pytest.raises(ValueError, match="image size must be at least 1, not 0"):
        load("digits", image_size=0)


def test_a_process_keeps_few_data_sets() -> None:
    known = []
    for count in range(100, 112):
        data = load(f"synthetic:n={count}:test=50").validation_split(0.1, 0)
        partition("iid", data, 2, 0)
        known.append(weakref.ref(data))
    del data
    gc.collect()
    assert sum(each() is not None for each in known) <= 4


def test_threads_that_load_at_once_share_one_object() -> None:
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load, ["synthetic:n=3000:test=77"] * 4))
    assert len({id(data) for data in loaded}) == 1


@pytest.mark.parametrize(
    "spec", ["no_such_module:data", "no-module:data", "fedbn_flwr.no_such:data", ""]
)
def test_an_unknown_name_is_an_error_that_lists_what_there_is(spec: str) -> None:
    with pytest.raises(ValueError, match=r"^(unknown )?data set") as error:
        load(spec)
    message = str(error.value)
    assert "\n" not in message
    assert repr(spec) in message
    assert all(name in message for name in DATASETS)


MODULE = """
import torch
from fedbn_flwr.data import Data, Split, load

def plain():
    split = Split(torch.rand(6, 1, 4, 4), torch.arange(6) % 2)
    return Data("plain", split, split, 2)

def own_moments():
    split = Split(torch.rand(6, 1, 4, 4), torch.arange(6) % 2, mean=(0.0,), std=(1.0,))
    return Data("own", split, split, 2)

def derived():
    return load("digits").validation_split(0.1, 0)

def pair():
    images, labels = torch.rand(6, 1, 4, 4), torch.arange(6) % 2
    return (images[:4], labels[:4]), (images[4:].numpy(), labels[4:].numpy())

def wrong():
    return 3

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"users_data_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_of_the_users_own(module: str) -> None:
    data = load(f"{module}:plain")
    assert data is load(f"{module}:plain")
    assert data.name == "plain"
    assert data.train.mean == pytest.approx([float(data.train.inputs.mean())])
    assert load(f"{module}:plain", image_size=10).image_size == 10
    assert load(f"{module}:own_moments").train.mean == (0.0,)
    pair = load(f"{module}:pair")
    assert (pair.name, pair.num_classes) == (f"{module}:pair", 2)
    assert (len(pair.train), len(pair.test)) == (4, 2)
    # it may load in turn
    assert len(load(f"{module}:derived").train) == 1437 - 144


def test_a_users_module_that_misses_a_package_says_which(module: str) -> None:
    with pytest.raises(ValueError, match=r"cannot import .*not_installed_anywhere"):
        load(f"{module}_broken:data")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar11", "unknown data set 'cifar11'; did you mean 'cifar10'"),
        ("syntetic:n=3", "unknown data set 'syntetic:n=3'; did you mean 'synthetic'"),
        ("synthetic:size_=3", r"synthetic: unknown option 'size_'; did you mean 'size'\?"),
        ("digits:size=3", "digits: unknown option 'size'; known: none"),
        ("synthetic:n=60:size=4:n=90", "synthetic: 'n' is given twice"),
        ("synthetic:n=many", "synthetic: n must be a whole number, got 'many'"),
        *(
            (f"synthetic:{option}", "synthetic: ")
            for option in ("n=5", "test=5", "classes=0", "size=0", "channels=0")
        ),
        *(
            (f"streets:{option}=0", "cities, images and test at least 1")
            for option in ("cities", "images", "test")
        ),
        ("folder:", "folder: needs a path"),
        ("{module}:wrong", r"wrong must be .*fedbn_flwr.data.Data, a pair .*, got int"),
        ("foldr:images", "cannot import 'foldr': .*; did you mean 'folder'"),
        ("{module}:number", "has no function 'number'"),
        ("{module}:absent", "has no function 'absent'"),
    ],
)
def test_a_mistake_is_named(spec: str, message: str, module: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(spec.format(module=module))


def test_the_path_of_a_folder_is_told_how_to_name_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a folder of images is 'folder:{tmp_path}'"):
        load(str(tmp_path))


def test_synthetic_is_balanced_and_a_function_of_its_options() -> None:
    data = load("synthetic:n=1003:test=30:classes=5:size=6:channels=2:seed=4")
    assert data.train.inputs.shape == (1003, 2, 6, 6)
    assert data.train.inputs.dtype == torch.uint8
    assert torch.bincount(data.train.labels).tolist() == [201, 201, 201, 200, 200]
    assert len(data.test) == 30
    same, other = (
        load(f"synthetic:size=6:n=1003:test=30:channels=2:seed={seed}:classes=5") for seed in (4, 5)
    )
    assert torch.equal(data.train.inputs, same.train.inputs)
    assert not torch.equal(data.train.inputs, other.train.inputs)
    assert not torch.equal(data.train.inputs[:30], data.test.inputs)


def test_synthetic_can_be_learned() -> None:
    data = load("synthetic:n=2000")
    prototypes = torch.stack(
        [data.train.inputs[data.train.labels == label].float().mean(0) for label in range(10)]
    )
    nearest = torch.cdist(data.test.inputs.flatten(1).float(), prototypes.flatten(1)).argmin(1)
    assert (nearest == data.test.labels).float().mean() > 0.9


def test_data_are_compared_by_identity() -> None:
    split = Split(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64))
    assert Data("a", split, split, 1) != Data("a", split, split, 1)
