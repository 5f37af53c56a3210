"""Data sets by name: what a spec asks for, and the functions that read one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedbn_flwr.data.file_split import WORKERS
from fedbn_flwr.data.splits import Data
from fedbn_flwr.plugins import add
from fedbn_flwr.plugins.options import Option, Range, option_key, read_options, read_pairs

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
        """Return the argument's path as a folder; without one, the folder of this name in `root`."""
        return Path(self.path).expanduser() if self.path else self.root / name

    @property
    def path(self) -> str:
        """The path (or name) in an argument `[PATH][:key=value]...`."""
        return self._parts[0]

    def options(self, **defaults: int | str) -> dict[str, Any]:
        """Read the argument as `key=value:key=value...`: these keys, of the types of their defaults."""
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
            option_key(name): Option(name, type(value), value, range=Range(0) if isinstance(value, int) else None)
            for name, value in defaults.items()
        }
        return {**defaults, **read_options(self.name, known, read_pairs(self.name, items))}


#: reads a data set
Read = Callable[[DatasetRequest], Data]
#: the data sets by name; `register_dataset` adds one
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
