"""`report --watch` beside a real matrix, in processes: the matrix is stopped while its page is looked at."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from fedbn_flwr.experiments.output.run_folder import read_json
from tests.helpers.checkout import BIN, environment
from tests.helpers.chromium import PROGRAM, browser
from tests.helpers.runs import OPTIONS
from tests.helpers.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]

MATRIX = {
    "about": "long enough to be stopped in its second cell",
    "options": {**OPTIONS, "model": "mlp", "rounds": 500, "evaluate-every": 10},
    "methods": ["fedavg", "fedavg+gn", "fedbn"],
    "seeds": 1,
}
WIDTHS = (390, 1280)


def test_the_page_follows_a_matrix_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(MATRIX))
    matrix, page = tmp_path / "out", tmp_path / "out/report/report.html"
    with process(tmp_path, "reproduce", "mine.yaml", "--results-dir", "out") as running:
        second = matrix / "runs/fedavg+gn-seed0/rounds.jsonl"
        assert wait_until(lambda: lines(second) > 20 or running.poll() is not None)
        os.killpg(running.pid, signal.SIGSTOP)
        assert lines(second) < 500
        # what a process that is stopped in the middle of a row leaves
        with second.open("a") as file:
            file.write('{"round": 999, "nod')
        with process(tmp_path, "report", "--watch", "out", "--every", "1") as watching:
            assert wait_until(lambda: page.is_file() or watching.poll() is not None)
            check_page(page, "3 runs: 1 finished, 1 unfinished, 1 waiting; about 0:0", pictures=3)
            second.write_bytes(second.read_bytes().rpartition(b"\n")[0] + b"\n")
            os.killpg(running.pid, signal.SIGCONT)
            assert watching.wait(600) == 0
            assert running.wait(600) == 0
            assert watching.stdout
            told = watching.stdout.read().splitlines()
    assert "1 finished, 1 unfinished, 1 waiting" in told[0]
    assert told[-2] == "mine: 3 runs: 3 finished"
    assert len(read_json(matrix / "results.json")) == 3
    check_page(page, "", pictures=3)
    assert 'http-equiv="refresh"' not in page.read_text()


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_page(page: Path, progress: str, pictures: int) -> None:
    """Look at the page at two widths: what it says of the progress, its pictures, and that nothing is wrong."""
    with browser() as opened:
        for width in WIDTHS:
            opened.open(page, width)
            text = "(document.querySelector('progress')?.previousElementSibling.textContent ?? '')"
            assert opened.evaluate(text).startswith(progress)
            assert opened.evaluate(f"{text} === ''") == (progress == "")
            assert opened.evaluate("[...document.images].filter(image => image.naturalWidth > 0).length") == pictures
            assert opened.evaluate("document.documentElement.scrollWidth") == width
        assert opened.console == []


@contextmanager
def process(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start `fedbn-flwr`, and end it with its children."""
    started = subprocess.Popen(
        [BIN / "fedbn-flwr", *words],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", COLUMNS="200"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        if started.stdout:
            started.stdout.close()
