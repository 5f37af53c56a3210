"""Data sets by name; `load` reads each data set once a process."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import TypeVar

from fedbn_flwr.data.digits import digits
from fedbn_flwr.data.domains import digits_domains
from fedbn_flwr.data.files import TORCHVISION, from_folder, from_torchvision
from fedbn_flwr.data.splits import Data
from fedbn_flwr.data.synthetic import synthetic
from fedbn_flwr.plugins import add

#: environment variable with the folder of data sets in files, and the folder without the variable
ROOT_VARIABLE, DEFAULT_ROOT = "FEDBN_FLWR_DATA", "~/.cache/fedbn-flwr"

#: held while loading; reentrant, because a user's function may call `load`
_loading = RLock()


@dataclass(frozen=True)
class DatasetRequest:
    """The parts of a spec `name[:argument]`, and where and how to read the data set."""

    name: str
    argument: str
    image_size: int | None
    root: Path

    def options(self, **defaults: int) -> dict[str, int]:
        """Read the argument as `key=value:key=value...`, whole numbers, with these keys and defaults."""
        values = dict(defaults)
        for part in self.argument.split(":") if self.argument else []:
            key, _, value = part.partition("=")
            if key not in defaults:
                there_are = f"there are: {', '.join(defaults)}" if defaults else "it has none"
                raise ValueError(f"{self.name}: unknown option {key!r}; {there_are}")
            if not value.isdecimal():
                raise ValueError(f"{self.name}: {key} must be a whole number, not {value!r}")
            values[key] = int(value)
        return values


#: reads a data set
Read = Callable[[DatasetRequest], Data]
DATASETS: dict[str, Read] = {}

R = TypeVar("R", bound=Read)


def register_dataset(name: str) -> Callable[[R], R]:
    """Register a function that reads a data set, under the name that `--dataset` takes; used as a decorator.

        @register_dataset("my-images")
        def my_images(request: DatasetRequest) -> Data:
            return Data("my-images", train, test, num_classes=10)

    It is called once a process for each spec. A name that another data set has is a ValueError.
    """

    def register(read: R) -> R:
        add(DATASETS, "data set", name, read)
        return read

    return register


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
    return synthetic(**request.options(n=10_000, test=1_000, classes=10, size=8, channels=3, seed=0))


def _torchvision(request: DatasetRequest) -> Data:
    """torchvision's data set of this name, from files in `data-root`."""
    request.options()
    return from_torchvision(request.name, request.root)


for _name in TORCHVISION:
    register_dataset(_name)(_torchvision)


@register_dataset("folder")
def _folder(request: DatasetRequest) -> Data:
    """Images in a folder with a folder for each class: `folder:PATH`."""
    if not request.argument:
        raise ValueError("folder: needs a path, as in folder:/data/images")
    return from_folder(Path(request.argument).expanduser(), request.image_size)


def load(spec: str, *, image_size: int | None = None, root: str | Path | None = None) -> Data:
    """Load the data set of a spec: `name`, `name:key=value...`, `folder:PATH` or `package.module:function`.

    The same arguments give the same object, shared by all clients of a process. `image_size` scales the
    images. Unless the data bring a mean and deviation of their own, those of the training split are used.
    """
    folder = Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser()
    if image_size is not None and image_size < 1:
        raise ValueError(f"the image size must be at least 1, not {image_size}")
    with _loading:  # clients in other threads wait for the first client
        return _load(spec, DATASETS.get(spec.partition(":")[0], _call), image_size, folder)


@cache
def _load(spec: str, read: Read, image_size: int | None, root: Path) -> Data:
    name, _, argument = spec.partition(":")
    request = DatasetRequest(name, argument, image_size, root)
    data = read(request)
    if image_size not in (None, data.image_size):
        data = data.resized(image_size)
    return data if data.train.mean else data.standardized()


def _call(request: DatasetRequest) -> Data:
    """Return the data that a user's function returns."""
    if not (request.argument.isidentifier() and all(part.isidentifier() for part in request.name.split("."))):
        raise _unknown(request)
    try:
        module = importlib.import_module(request.name)
    except ModuleNotFoundError as error:
        if not f"{request.name}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
        raise _unknown(request) from error
    function = getattr(module, request.argument, None)
    if not callable(function):
        raise ValueError(f"{request.name} has no function {request.argument!r}")
    data = function()
    if not isinstance(data, Data):
        raise ValueError(
            f"{request.name}:{request.argument} must return fedbn_flwr.data.Data, not {type(data).__name__}"
        )
    return data


def _unknown(request: DatasetRequest) -> ValueError:
    spec = f"{request.name}:{request.argument}" if request.argument else request.name
    return ValueError(f"unknown data set {spec!r}; there are: {', '.join(DATASETS)}, or package.module:function")
