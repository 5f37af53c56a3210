"""Processes that have the simulated accelerator, and what it is asked to do in a block."""

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.checkout import ROOT

FOLDER = Path(__file__).parent / "installed"
#: what the host asks of a device
KINDS = ("kernel", "to device", "to host", "wait")
#: where the line is looked for that asked
_OURS = tuple(f"{ROOT}/{room}/" for room in ("fedbn_flwr", "strategies"))


def environment(**others: str) -> dict[str, str]:
    """Return the environment of a process that has the device."""
    path = os.pathsep.join(filter(None, [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **others}


class Tally(Counter[tuple[str, str, str]]):
    """How often the device was asked: by kind, operation and the project's line."""

    def of(self, *kinds: str) -> int:
        """Return how often this was asked."""
        return sum(count for (kind, _, _), count in self.items() if kind in kinds)


@contextmanager
def counting() -> Iterator[Tally]:
    """Count in this process, in all of its threads."""
    device: Any = importlib.import_module("fake_accelerator")
    tally = Tally()
    device.observer = lambda kind, name, _: tally.update([(kind, name, _line())])
    try:
        yield tally
    finally:
        device.observer = None


def _line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return (
        ""
        if frame is None
        else f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
    )
