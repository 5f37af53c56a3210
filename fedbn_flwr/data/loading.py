"""Data sets by name. `load` reads each once a process."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock

from fedbn_flwr.data.digits import digits
from fedbn_flwr.data.domains import digits_domains
from fedbn_flwr.data.files import TORCHVISION, from_folder, from_torchvision
from fedbn_flwr.data.splits import Data
from fedbn_flwr.data.synthetic import synthetic

#: where data sets in files are looked for, unless `load` is told
ROOT_VARIABLE, DEFAULT_ROOT = "FEDBN_FLWR_DATA", "~/.cache/fedbn-flwr"

#: held while loading; a function of the user's own may load in turn
_loading = RLock()


@dataclass(frozen=True)
class Request:
    """A spec `name[:argument]`, taken apart, and where and how to read."""

    name: str
    argument: str
    image_size: int | None
    root: Path

    def options(self, **defaults: int) -> dict[str, int]:
        """The argument as `key=value:key=value...`, whole numbers, only of the keys that have a default."""
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


def _digits(request: Request) -> Data:
    request.options()
    return digits()


def _digits_domains(request: Request) -> Data:
    request.options()
    return digits_domains()


def _synthetic(request: Request) -> Data:
    return synthetic(**request.options(n=10_000, test=1_000, classes=10, size=8, channels=3, seed=0))


def _torchvision(request: Request) -> Data:
    request.options()
    return from_torchvision(request.name, request.root)


def _folder(request: Request) -> Data:
    if not request.argument:
        raise ValueError("folder: needs a path, as in folder:/data/images")
    return from_folder(Path(request.argument).expanduser(), request.image_size)


DATASETS: dict[str, Callable[[Request], Data]] = {
    "digits": _digits,
    "digits-domains": _digits_domains,
    "synthetic": _synthetic,
    "folder": _folder,
    **dict.fromkeys(TORCHVISION, _torchvision),
}


def load(spec: str, *, image_size: int | None = None, root: str | Path | None = None) -> Data:
    """The data set of a spec: `name`, `name:key=value...`, `folder:PATH` or `package.module:function`.

    The same arguments give the same object, shared by all clients of a process. `image_size` scales the
    images. Unless the data bring a mean and deviation of their own, those of the training split are used.
    """
    folder = Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser()
    if image_size is not None and image_size < 1:
        raise ValueError(f"the image size must be at least 1, not {image_size}")
    with _loading:  # clients in threads of one process wait for the first of them
        return _load(spec, image_size, folder)


@cache
def _load(spec: str, image_size: int | None, root: Path) -> Data:
    name, _, argument = spec.partition(":")
    request = Request(name, argument, image_size, root)
    data = DATASETS[name](request) if name in DATASETS else _call(request)
    if image_size not in (None, data.image_size):
        data = data.resized(image_size)
    return data if data.train.mean else data.standardized()


def _call(request: Request) -> Data:
    """The data that a function of the user's own returns."""
    if not (request.argument.isidentifier() and all(part.isidentifier() for part in request.name.split("."))):
        raise _unknown(request)
    try:
        module = importlib.import_module(request.name)
    except ModuleNotFoundError as error:
        if not f"{request.name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses one that it imports
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


def _unknown(request: Request) -> ValueError:
    spec = f"{request.name}:{request.argument}" if request.argument else request.name
    return ValueError(f"unknown data set {spec!r}; there are: {', '.join(DATASETS)}, or package.module:function")
