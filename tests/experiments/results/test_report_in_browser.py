"""The page in a browser: nothing on the console, all pictures drawn, columns sorted by a click, on
a phone too.
"""

import json
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.experiments import main
from tests.helpers.matrix_files import write_matrix

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CELLS = {
    ("IID, E=1", "BN"): (0.9, 0.8),
    ("IID, E=1", "GN"): (0.105, 0.105),
    ("Shards, E=1", "BN"): (0.3, 0.3),
}
#: sorts the first table by its score, and back, and puts what it has seen into the title
LOOK = """
const page = frames[0].document, all = selector => [...page.querySelectorAll(selector)], seen = {};
const [, , score, difference] = all("table.results th"), button = score.firstElementChild;
const column = () => all("table.results tbody tr").map(row => row.cells[2].textContent.split(" ")[0]);
seen.pictures = all("img").map(image => image.complete && image.naturalWidth);
seen.heights = all("main > section > .scroll table").map(table => table.offsetHeight);
seen.difference = [difference.innerText, difference.getBoundingClientRect().right];
seen.width = page.documentElement.scrollWidth;
seen.button = button.tagName;
seen.columns = [column()];
for (const _ of [1, 2]) {
  button.click();
  seen.columns.push(column());
}
seen.order = score.ariaSort;
document.title = JSON.stringify(seen);
"""


def look(path: Path, width: int) -> dict[str, Any]:
    """Return what `LOOK` has seen of a page in a frame of this width.

    The page has written nothing to the console.
    """
    frame = (
        f'<iframe width="{width}" height="900" frameborder="0" '
        f'srcdoc="{escape(path.read_text())}" onload="look()">'
    )
    around = path.with_name("around.html")
    around.write_text(
        f"<!doctype html><title></title><script>function look() {{{LOOK}}}</script>{frame}</iframe>"
    )
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    words += [
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--dump-dom",
        around.as_uri(),
    ]
    shown = subprocess.run(
        [str(PROGRAM), *words], capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in shown.stderr
    seen: dict[str, Any] = json.loads(
        unescape(shown.stdout.partition("<title>")[2].partition("</title>")[0])
    )
    return seen


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)")
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("width", [390, 1280])
def test_tables_and_pictures_are_shown_and_columns_are_sorted(width: int, tmp_path: Path) -> None:
    assert (
        main(["report", str(write_matrix(tmp_path, CELLS)), "--out", str(tmp_path / "page")]) == 0
    )
    seen = look(tmp_path / "page/report.html", width)
    assert seen["pictures"] == [1040] * len(list((tmp_path / "page").glob("*.png")))
    assert len(seen["heights"]) == 2
    assert min(seen["heights"]) > 50
    # the difference stands beside the score, on a phone too
    heading, right = seen["difference"]
    assert heading.startswith("vs BN")
    assert right <= width
    # tables scroll, the page does not
    assert seen["width"] == width
    # the keyboard reaches a button as the mouse does
    assert seen["button"] == "BUTTON"
    before, ascending, descending = seen["columns"]
    numbers = [text for text in before if text[:1].isdigit()]
    assert ascending[: len(numbers)] == sorted(numbers, key=float) != numbers
    # cells without a number stay last
    assert set(ascending[len(numbers) :]) == {"waiting"}
    assert descending[: len(numbers)] == sorted(numbers, key=float, reverse=True)
    assert seen["order"] == "descending"
