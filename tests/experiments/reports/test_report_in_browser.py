"""The page in a browser: nothing on the console, all pictures drawn, columns sorted by mouse and by keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbn_flwr.experiments import main
from tests.helpers.chromium import PROGRAM, Browser, browser
from tests.helpers.matrix_files import write_matrix

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]

WIDTHS = (390, 1280)
CELLS = {("IID, E=1", "BN"): (0.9, 0.8), ("IID, E=1", "GN"): (0.105, 0.105), ("Shards, E=1", "BN"): (0.3, 0.3)}
#: the texts of the first table's column `here`
COLUMN = "[...document.querySelectorAll('table.results tbody tr')].map(row => row.cells[2].textContent.split(' ')[0])"
HEADING = "document.querySelectorAll('table.results th button')[2]"


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def report(tmp_path: Path) -> Path:
    assert main(["report", str(write_matrix(tmp_path, CELLS)), "--out", str(tmp_path / "page")]) == 0
    return tmp_path / "page/report.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_and_pictures_are_shown_without_an_error(page: Browser, report: Path, width: int) -> None:
    page.open(report, width)
    assert page.evaluate("[...document.images].map(image => image.complete && image.naturalWidth)") == [1040] * len(
        list(report.parent.glob("*.png"))
    )
    heights = page.evaluate("[...document.querySelectorAll('main > section > .scroll table')].map(t => t.offsetHeight)")
    assert len(heights) == 2
    assert min(heights) > 50
    # the difference stands beside the score, on a phone too
    difference = "document.querySelectorAll('table.results th')[3]"
    assert page.evaluate(f"{difference}.innerText").startswith("difference")
    assert page.evaluate(f"{difference}.getBoundingClientRect().right") <= width
    # tables scroll, the page does not
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.console == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_sorts_by_number_and_back(page: Browser, report: Path, width: int) -> None:
    page.open(report, width)
    numbers = [text for text in page.evaluate(COLUMN) if text[:1].isdigit()]
    page.evaluate(f"{HEADING}.click()")
    ordered = page.evaluate(COLUMN)
    assert ordered[: len(numbers)] == sorted(numbers, key=float) != numbers
    # cells without a number stay last
    assert set(ordered[len(numbers) :]) == {"waiting"}
    page.evaluate(f"{HEADING}.click()")
    assert page.evaluate(COLUMN)[: len(numbers)] == sorted(numbers, key=float, reverse=True)
    assert page.evaluate(f"{HEADING}.closest('th').ariaSort") == "descending"
    assert page.console == []


def test_the_keyboard_sorts(page: Browser, report: Path) -> None:
    page.open(report, 1280)
    page.evaluate("document.querySelector('table.results th button').focus()")
    for _ in range(2):
        page.press("Tab", "Tab", "\t")
    page.press("Enter", "Enter", "\r")
    assert page.evaluate(f"{HEADING}.closest('th').ariaSort") == "ascending"
    numbers = [text for text in page.evaluate(COLUMN) if text[:1].isdigit()]
    assert numbers == sorted(numbers, key=float)
