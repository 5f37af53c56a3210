"""Loading data sets by name; a process keeps the last ones."""

import importlib
import os
from functools import lru_cache
from math import isfinite
from pathlib import Path
from threading import RLock

from fedbn_flwr.data import readers as readers  # registers them
from fedbn_flwr.data.dataset_registry import DATASETS, DatasetRequest, Read
from fedbn_flwr.data.file_split import WORKERS
from fedbn_flwr.data.files import TORCHVISION, TORCHVISION_ROOT
from fedbn_flwr.data.splits import Data
from fedbn_flwr.plugins import Named, did_you_mean

#: environment variable with the folder of data sets in files, and the folder without the variable
ROOT_VARIABLE, DEFAULT_ROOT = "FEDBN_FLWR_DATA", "~/.cache/fedbn-flwr"

#: held while loading; reentrant, because a user's function may call `load`
_loading = RLock()


def load(
    spec: str, *, image_size: int | None = None, root: str | Path | None = None, image_workers: int = WORKERS
) -> Data:
    """Load the data set of a spec: `name`, `name:key=value...`, `name:PATH` or `package.module:function`.

    The same arguments give the same object, shared by all clients of a process, while it is one of the last two.
    `image_size` scales the images. Unless the data bring a mean and deviation of their own, those of the training split
    are used. Images that stay in files are decoded by `image_workers` processes, ahead of training; with 0, by the
    process that trains.
    """
    folder = Path(root or os.environ.get(ROOT_VARIABLE) or _usual_root(spec)).expanduser()
    if image_size is not None and image_size < 1:
        raise ValueError(f"the image size must be at least 1, not {image_size}")
    with _loading:  # clients in other threads wait for the first client
        if isinstance(spec, Named):
            return _prepared(spec.target, image_size)
        return _load(spec, DATASETS.get(spec.partition(":")[0], _call), image_size, folder, image_workers)


@lru_cache(maxsize=2)
def _load(spec: str, read: Read, image_size: int | None, root: Path, image_workers: int) -> Data:
    name, _, argument = spec.partition(":")
    request = DatasetRequest(name, argument, image_size, root, image_workers)
    return _prepare(read(request), image_size)


def _usual_root(spec: str) -> str | Path:
    """Return `./data` if it holds a data set of torchvision, as in torchvision's examples; else the default."""
    holds = spec in TORCHVISION and (TORCHVISION_ROOT / TORCHVISION[spec][2]).exists()
    return TORCHVISION_ROOT.absolute() if holds else DEFAULT_ROOT


def _prepare(data: Data, image_size: int | None) -> Data:
    """Return the data with images of this size, normalized; a value that is not finite is a ValueError."""
    for role, inputs in (("training", data.train.inputs), ("test", data.test.inputs)):
        # the extremes take no copy of the data
        if inputs.is_floating_point() and inputs.numel() and not all(map(isfinite, inputs.aminmax())):
            sample = int((~inputs.isfinite()).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"{data.name}: {role} sample {sample} has a value that is not a finite number")
    if image_size not in (None, data.image_size):
        data = data.resized(image_size)
    return data if data.train.mean else data.standardized()


#: for a user's own data
_prepared = lru_cache(maxsize=2)(_prepare)


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
    return ValueError(f"unknown data set {spec!r}; {did_you_mean(spec, DATASETS, 'or package.module:function')}")
