"""Runs the tests of `on_device/` in processes that have the simulated accelerator: torch knows one
for each process.
"""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from benchmarks.gpu import PARTS
from tests.fake_accelerator.tally import environment
from tests.helpers.checkout import ROOT

FOLDER = Path(__file__).parent / "on_device"
#: files whose device has no float64, and all others
WITHOUT = [FOLDER / "without_float64.py"]
FILES = sorted({*FOLDER.glob("*.py")} - {*WITHOUT})
#: seconds after which a step is taken to wait forever: by themselves, all files take a small part of
#: them
DEADLINE = 1800
HAS_DEVICE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
SKIPPED = (
    "the simulated accelerator needs torch 2.14: nothing was run on a device other than the CPU"
)

pytestmark = pytest.mark.skipif(not HAS_DEVICE, reason=SKIPPED)
if not HAS_DEVICE:
    warnings.warn(SKIPPED, stacklevel=1)  # which a run shows at its end


@pytest.mark.parametrize(
    ("files", "float64", "chosen"),
    [
        pytest.param(FILES, "1", "not slow", id="with float64"),
        pytest.param(WITHOUT, "0", "not slow", id="without"),
        pytest.param(FILES, "1", "slow", id="slow", marks=pytest.mark.slow),
    ],
)
def test_on_the_device(files: list[Path], float64: str, chosen: str, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        chosen,
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=short",
        *map(str, files),
    ]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment(
            FAKE_ACCELERATOR_FAILS=str(tmp_path / "fails"), FAKE_ACCELERATOR_FLOAT64=float64
        ),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not hasattr(torch, "fake"), "the other tests of this process would have the device"


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_the_checks_of_a_gpu_run_here_and_say_what_they_skip(part: str) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--only", part, "--seconds", "9000"]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()[-1].split("|")[2].strip()
    # the device does not tell its memory
    assert said == ("skipped" if part == "memory" else "passed")
