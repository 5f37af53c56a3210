"""Pictures of runs take longer than the runs: they are only drawn where a test looks at one."""

from pathlib import Path
from typing import IO

import pytest
from matplotlib.figure import Figure
from PIL import Image


@pytest.fixture
def drawn() -> None:
    """Pictures are drawn."""


@pytest.fixture(autouse=True)
def _composed_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures get their lines and labels, and are written as one pixel: to lay them out takes most of the time."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", one_pixel)


def one_pixel(figure: Figure, file: Path | IO[bytes], **_: object) -> None:
    Image.new("L", (1, 1)).save(file, "png")
