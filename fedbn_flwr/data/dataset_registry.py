"""Data sets by name: what a spec asks for, and the functions that read one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedbn_flwr.data.file_split import WORKERS
from fedbn_flwr.data.splits import Data
from fedbn_flwr.plugins import add

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

    def home(self, *names: str) -> Path:
        """Return the argument's path as a folder; without one, the first of these folders of `root` that exists."""
        if self.path:
            return Path(self.path).expanduser()
        homes = [self.root / name for name in names]
        return next((home for home in homes if home.is_dir()), homes[0])

    @property
    def path(self) -> str:
        """The path (or name) in an argument `[PATH][:key=value]...`."""
        return self._path_and_options[0]

    @property
    def _path_and_options(self) -> tuple[str, list[str]]:
        """Split `PATH:key=value...`; what comes before the first `:key=` is the path."""
        path, *options = re.split(r":(?=[a-z]+=)", f":{self.argument}")
        return path.removeprefix(":"), options

    def options(self, **defaults: int) -> dict[str, int]:
        """Read the argument as `key=value:key=value...`, whole numbers, with these keys and defaults."""
        return self._numbers(self.argument.split(":") if self.argument else [], defaults)

    def options_after_path(self, **defaults: int) -> dict[str, int]:
        """Read the options of an argument `[PATH][:key=value]...`, as `options` does."""
        return self._numbers(self._path_and_options[1], defaults)

    def texts_after_path(self, *known: str) -> dict[str, str]:
        """Read the options of an argument `[PATH][:key=value]...` as texts."""
        pairs = [part.partition("=") for part in self._path_and_options[1]]
        self._check_keys([key for key, _, _ in pairs], known)
        return {key: value for key, _, value in pairs}

    def _numbers(self, parts: Sequence[str], defaults: Mapping[str, int]) -> dict[str, int]:
        values = dict(defaults)
        for part in parts:
            key, _, value = part.partition("=")
            self._check_keys([key], list(defaults))
            if not value.isdecimal():
                raise ValueError(f"{self.name}: {key} must be a whole number, not {value!r}")
            values[key] = int(value)
        return values

    def _check_keys(self, keys: Sequence[str], known: Sequence[str]) -> None:
        for key in keys:
            if key not in known:
                there_are = f"there are: {', '.join(known)}" if known else "it has none"
                raise ValueError(f"{self.name}: unknown option {key!r}; {there_are}")


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
