"""Data sets by name: what a spec asks for, the functions that read one, and loading.

A process keeps the last ones.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedbn_flwr.data.domains import digits, digits_domains, image_domains
from fedbn_flwr.data.file_split import WORKERS
from fedbn_flwr.data.files import TORCHVISION, from_folder, from_torchvision, list_images
from fedbn_flwr.data.own_data import OwnData, own_data
from fedbn_flwr.data.sets import mnist
from fedbn_flwr.data.sets.cityscapes import cityscapes
from fedbn_flwr.data.sets.fedbn_archives import (
    DIGITS_SAMPLES,
    DOMAINNET,
    OFFICE,
    digits_five,
    read_domains,
)
from fedbn_flwr.data.sets.hugging_face import CHOICES, hugging_face, saved_folder
from fedbn_flwr.data.sets.imagenet import imagenet, tiny_imagenet
from fedbn_flwr.data.sets.listing import FileList, list_below
from fedbn_flwr.data.splits import Data, Split
from fedbn_flwr.data.streets import SIDE, streets
from fedbn_flwr.plugins import Own, add, import_function, warn_once
from fedbn_flwr.plugins.options import Option, Range, option_key, read_options, read_pairs
from fedbn_flwr.randomness import torch_generator

#: standard deviations of the prototypes' pixels and of the noise upon them, in grey levels around
#: 128
SPREAD = 32.0
NOISE = 64.0
#: number of samples drawn at a time, so that no float copy of the whole data set exists
CHUNK = 4096
#: environment variable with the folder of data sets in files, and the folder without the variable
ROOT_VARIABLE = "FEDBN_FLWR_DATA"
DEFAULT_ROOT = "~/.cache/fedbn-flwr"
#: held while loading; reentrant, because a user's function may call `load`
_loading = RLock()
#: the data set of a run for which every site of a deployment has data of its own
SITES = "sites"


@dataclass(frozen=True)
class DatasetRequest:
    """The parts of a spec `name[:argument]`, and where and how to read the data set."""

    name: str
    argument: str
    image_size: int | None
    root: Path
    #: processes that decode image files ahead of training
    image_workers: int = WORKERS

    def home(self, name: str) -> Path:
        """Return the argument's path as a folder; without one, the folder of this name in
        `root`.
        """
        if self.path:
            return Path(self.path).expanduser()
        return self.root / name

    @property
    def path(self) -> str:
        """The path (or name) in an argument `[PATH][:key=value]...`."""
        return self._parts[0]

    def options(self, **defaults: int | str) -> dict[str, Any]:
        """Read the argument as `key=value:key=value...`: these keys, of the types of their
        defaults.
        """
        return self._read(defaults, [*filter(None, [self.path]), *self._parts[1]])

    def options_after_path(self, **defaults: int | str) -> dict[str, Any]:
        """Read the options of an argument `[PATH][:key=value]...`, as `options` does."""
        return self._read(defaults, self._parts[1])

    @property
    def _parts(self) -> tuple[str, list[str]]:
        """Split `PATH:key=value...`; what comes before the first `:key=` is the path."""
        path, *options = re.split(r":(?=[a-z-]+=)", f":{self.argument}")
        return path.removeprefix(":"), options

    def _read(self, defaults: Mapping[str, int | str], items: Sequence[str]) -> dict[str, Any]:
        known = {
            option_key(name): Option(
                name, type(value), value, range=Range(0) if isinstance(value, int) else None
            )
            for name, value in defaults.items()
        }
        return {**defaults, **read_options(self.name, known, read_pairs(self.name, items))}


#: the data sets of MNIST's four files, which may hold anything, by the name of what they show
MADE_OF_MNIST = {**{name: name for name in mnist.FOLDERS}, "fashion-domains": "fashion-mnist"}
#: the folders in `data-root` of data sets that are read from files, by name
FOLDERS: dict[str, str] = {}
#: reads a data set
Read = Callable[[DatasetRequest], Data]
R = TypeVar("R", bound=Read)
#: the data sets by name; `register_dataset` adds one
DATASETS: dict[str, Read] = {}


def register_dataset(name: str) -> Callable[[R], R]:
    """Register a function that reads a data set, under the name that `--dataset` takes.

    Used as a decorator.

        @register_dataset("my-images")
        def my_images(request: DatasetRequest) -> Data:
            return Data("my-images", train, test, num_classes=10)

    It is called once a process for each spec. A name that another data set has is a ValueError.
    """

    def register(read: R) -> R:
        add(DATASETS, "data set", name, read)
        return read

    return register


def synthetic(n: int, test: int, classes: int, size: int, channels: int, seed: int) -> Data:
    """Make a Gaussian prototype a class, and samples with Gaussian noise around it, as bytes.

    Classes are of equal size to within one sample. The data are easy to learn, and say nothing
    about images.
    """
    if classes < 1 or size < 1 or channels < 1:
        raise ValueError("synthetic: classes, size and channels must be at least 1")
    if min(n, test) < classes:
        raise ValueError(f"synthetic: n={n} and test={test} must be at least the {classes} classes")
    generator = torch_generator(seed, "synthetic", "prototypes")
    prototypes = 128 + SPREAD * torch.randn(classes, channels, size, size, generator=generator)
    train = _samples(prototypes, n, torch_generator(seed, "synthetic", "train"))
    return Data(
        "synthetic",
        train,
        _samples(prototypes, test, torch_generator(seed, "synthetic", "test")),
        classes,
    )


def _samples(prototypes: Tensor, count: int, generator: torch.Generator) -> Split:
    labels = torch.arange(count) % len(prototypes)
    inputs = torch.empty((count, *prototypes.shape[1:]), dtype=torch.uint8)
    for chunk, chosen in zip(torch.split(inputs, CHUNK), torch.split(labels, CHUNK), strict=True):
        noise = torch.randn(chunk.shape, generator=generator)
        chunk.copy_(noise.mul_(NOISE).add_(prototypes[chosen]).clamp_(0, 255))
    return Split(inputs, labels)


@register_dataset("digits")
def _digits(request: DatasetRequest) -> Data:
    """1,797 real handwritten digits of 8x8 pixels, which scikit-learn ships."""
    request.options()
    return digits()


@register_dataset("digits-domains")
def _digits_domains(request: DatasetRequest) -> Data:
    """Digits in five domains: real, of fonts, before photographs, inverted, sheared."""
    request.options()
    return digits_domains()


@register_dataset("synthetic")
def _synthetic(request: DatasetRequest) -> Data:
    """Random images of given number, classes and size, for timing."""
    return synthetic(
        **request.options(n=10_000, test=1_000, classes=10, size=8, channels=3, seed=0)
    )


@register_dataset("streets")
def _streets(request: DatasetRequest) -> Data:
    """Drawn streets with label maps by city, for segmentation."""
    return streets(
        request.image_size or SIDE, **request.options(cities=6, images=32, test=8, seed=0)
    )


def _torchvision(request: DatasetRequest) -> Data:
    """torchvision's data set of this name, from files in `data-root`."""
    request.options_after_path()
    return from_torchvision(request.name, request.home(""), elsewhere=not request.path)


for _name in TORCHVISION:
    register_dataset(_name)(_torchvision)


@register_dataset("fashion-domains")
def _fashion_domains(request: DatasetRequest) -> Data:
    """Fashion-MNIST in four domains: real, before photographs, inverted, sheared."""
    source = replace(request, name=MADE_OF_MNIST[request.name])
    return image_domains(request.name, _torchvision(source))


@register_dataset(SITES)
def _sites(request: DatasetRequest) -> Data:
    """Data that the sites of a deployment have, each its own."""
    raise ValueError(f"the data set {SITES!r} is at the sites of a deployment; there is none here")


@register_dataset("folder")
def _folder(request: DatasetRequest) -> Data:
    """Images in a folder with a folder for each class: `folder:PATH`."""
    if not request.argument:
        raise ValueError("folder: needs a path, as in folder:/data/images")
    return from_folder(
        Path(request.argument).expanduser(), request.image_size, request.image_workers
    )


def _register(
    name: str, folder: str, side: int, read: Callable[..., Data], about: str, **defaults: int
) -> None:
    """Register a data set of images in a folder of `data-root`, or elsewhere:
    `NAME[:PATH][:key=value]...`.
    """

    def read_folder(request: DatasetRequest) -> Data:
        options = request.options_after_path(**defaults)
        return read(
            request.home(folder), request.image_size or side, request.image_workers, **options
        )

    FOLDERS[name] = folder
    read_folder.__doc__ = about
    register_dataset(name)(read_folder)


_about = "MNIST, SVHN, USPS, SynthDigits and MNIST-M as domains, in FedBN's archive."
_register("digits-five", "digits-five", 28, digits_five, _about, samples=DIGITS_SAMPLES)
for _lists in (OFFICE, DOMAINNET):
    _about = f"{_lists.about} with FedBN's lists of files, from `{_lists.folder}` in `data-root`."
    _register(_lists.name, _lists.folder, 256, partial(read_domains, _lists), _about, samples=0)
_register("imagenet", "imagenet", 224, imagenet, "ImageNet-1K, from `imagenet` in `data-root`.")
_register(
    "tiny-imagenet",
    "tiny-imagenet-200",
    64,
    tiny_imagenet,
    "Tiny-ImageNet, from `tiny-imagenet-200` in `data-root`.",
)
_about = (
    "Street scenes with label maps by city, from `cityscapes` in `data-root`, for segmentation."
)
_register("cityscapes", "cityscapes", 768, cityscapes, _about)


@register_dataset("hf")
def _hugging_face(request: DatasetRequest) -> Data:
    """A data set of images of the Hugging Face Hub, or saved from there: `hf:NAME`."""
    name = request.path
    options = request.options_after_path(**CHOICES)
    if not name:
        raise ValueError("hf: needs a name, as in hf:uoft-cs/cifar10")
    return hugging_face(name, request.root, request.image_size, request.image_workers, options)


def load(
    spec: str | Own,
    *,
    image_size: int | None = None,
    channels: int = 0,
    root: str | Path | None = None,
    image_workers: int = WORKERS,
) -> Data:
    """Load the data set of a spec: `name`, `name:key=value...`, `name:PATH` or
    `package.module:function`.

    The same arguments give the same object, shared by all clients of a process, while it is one of
    the last two. `image_size` scales the images, and grey ones are repeated to `channels`. Unless
    the data bring a mean and deviation of their own, those of the training split are used. Images
    that stay in files are decoded by `image_workers` processes, ahead of training; with 0, by the
    process that trains.
    """
    folder = root_of(root)
    if image_size is not None and image_size < 1:
        raise ValueError(f"the image size must be at least 1, not {image_size}")
    with _loading:  # clients in other threads wait for the first client
        if isinstance(spec, Own):
            return _prepared(spec.target, image_size, channels)
        name, _, argument = spec.partition(":")
        if name in DATASETS:
            request = DatasetRequest(name, argument, image_size, folder, image_workers)
            return _load(request, DATASETS[name], image_size, channels)
        if spec and Path(spec).is_dir():
            raise ValueError(f"unknown data set {spec!r}; a folder of images is 'folder:{spec}'")
        return _call(spec, import_function("data set", spec, DATASETS), image_size, channels)


def files_of(spec: str, root: str | Path | None = None) -> FileList:
    """Return the files that a data set is read from: none if its name says what it holds.

    MNIST's are those that a spec has the path of: others may still have to be downloaded.
    """
    name, _, argument = spec.partition(":")
    request = DatasetRequest(name, argument, None, root_of(root))
    if name == "folder":
        return list_images(Path(argument).expanduser())
    if request.path and name in MADE_OF_MNIST:
        return mnist.list_files(MADE_OF_MNIST[name], request.home(""))
    home = None
    if name == "hf":
        home = saved_folder(request.path, request.root)
    elif name in FOLDERS:
        home = request.home(FOLDERS[name])
    if home is None:
        return FileList(request.root)
    return list_below(home)


def root_of(given: str | Path | None) -> Path:
    """Return the folder of data sets in files."""
    return Path(given or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser()


@lru_cache(maxsize=2)
def _load(request: DatasetRequest, read: Read, image_size: int | None, channels: int) -> Data:
    return _prepare(read(request), image_size, channels)


def forget() -> None:
    """Read data sets of a name again when they are asked for."""
    with _loading:
        _load.cache_clear()


def _prepare(data: Data, image_size: int | None, channels: int) -> Data:
    """Return the data with such images, normalized; a value that is not finite is a ValueError."""
    splits = ("training", data.train), ("test", data.test)
    for role, values in (
        (role, values) for role, split in splits for values in (split.inputs, split.labels)
    ):
        # the extremes take no copy of the data
        if (
            values.is_floating_point()
            and values.numel()
            and not all(map(isfinite, values.aminmax()))
        ):
            sample = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0])
            raise ValueError(
                f"{data.name}: {role} sample {sample} has a value that is not a finite number"
            )
    if data.train.inputs.is_floating_point() and len(data.train) and len(data.test):
        train, test = (float(split.inputs.abs().max()) for _, split in splits)
        if max(train, test) > 50 * min(train, test):
            warn_once(
                f"{data.name}: training inputs reach {train:g}, test inputs {test:g}: are they on "
                "one scale?"
            )
    if image_size not in (None, data.image_size):
        data = data.resized(image_size)
    if channels not in (0, data.in_channels):
        data = data.repeated(channels)
    if data.train.mean:
        return data
    return data.standardized()


#: for a user's own data
_prepared = lru_cache(maxsize=2)(_prepare)


@lru_cache(maxsize=2)
def _call(
    spec: str, function: Callable[[], OwnData], image_size: int | None, channels: int
) -> Data:
    """Return the data that a user's function returns: the same object as long as it is the same
    function.
    """
    return _prepare(own_data(function, spec), image_size, channels)
