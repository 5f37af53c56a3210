"""What every test can rely on."""

import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from fedbn_flwr.plugins import warn_once

# tests run side by side, one a core, and compare bits
torch.set_num_threads(1)

#: files that are no tests here: Ray has no version for Python 3.15 yet
collect_ignore: list[str] = []
if sys.version_info >= (3, 15) and find_spec("ray") is None:
    collect_ignore.append("simulation/test_ray.py")

#: modules that processes need which tests start, and whose import takes seconds
NEEDED = ["benchmarks.engines", "tests.helpers.concurrent_nodes"]


def _preload(modules: Sequence[str], before: Callable[..., None], **options: str) -> None:
    before([*modules, *NEEDED], **options)


# whoever starts the process that others are forked from: it is the same one until this process ends
forkserver.set_forkserver_preload = partial(_preload, before=forkserver.set_forkserver_preload)
forkserver.set_forkserver_preload([])

# how long an example takes tells how busy the machine is, and is no reason to fail
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")

#: the files that take longer than ten seconds
LONGEST = {
    "test_on_device",
    "test_loopback_run",
    "test_docs",
    "test_packaging",
    "test_ray",
    "test_side_channel",
}


@pytest.fixture(autouse=True)
def _warned_of_nothing() -> None:
    """What an earlier test was warned of is said again."""
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws does not depend on which ones ran before it in this process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def flower_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Flower logs, and this project with it: Flower's logger does not pass on to the root
    logger.
    """
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def only_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures get their lines and labels, and are written as one pixel: to lay one out takes
    longer than a run.
    """

    def one_pixel(figure: object, file: Path | IO[bytes], **_: object) -> None:
        from PIL import Image  # absent where this package is installed without extras

        Image.new("L", (1, 1)).save(file, "png")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", one_pixel)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call most cases of a sampled test slow; begin with the files that take longest, so that at
    the end no process waits long for another one.
    """
    sampled: dict[tuple[Path, str, int], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and not item.get_closest_marker("slow"):
            place = (item.path, getattr(item, "originalname", ""), marker.args[0])
            sampled.setdefault(place, []).append(item)
    for (_, _, count), cases in sampled.items():
        chosen = {index * len(cases) // count for index in range(count)}
        for index, item in enumerate(cases):
            if index not in chosen:
                item.add_marker("slow")
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish() -> None:
    """Take what thousands of collected tests consist of out of what Python looks through for
    garbage.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it is garbage, or libraries complain of what they find left."""
    gc.unfreeze()
