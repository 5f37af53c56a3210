"""Test what plugs into Flower projects under other versions of Python and Flower: `make matrix`.

For each cell PYTHON:FLOWER the wheel is installed without extras into an environment of its own,
which is removed afterwards. Prints a row a cell, and fails if a test does. An environment takes 5
GB and half a minute.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.checkout import BIN, copy_checkout, environment, run

#: tests that need no extra
TESTS = (
    "tests/clientapp/test_own_loop.py",
    "tests/clientapp/test_users_projects.py",
    "tests/wire",
    "tests/layerwise/test_exchange.py",
    "tests/layerwise/test_shared_statistics.py",
    "tests/layerwise/test_suspended_step.py",
    "tests/simulation/processes/test_in_workers.py",
)
#: needs torchvision, an extra
LEFT_OUT = "tests/layerwise/test_shared_statistics.py::test_whole_models_are_exact"
#: Flower 1.42 requires a certifi that some package mirrors do not have yet; older Flowers have no
#: such requirement
OVERRIDE = "certifi>=2024"


def main(cells: list[str]) -> int:
    """Test each cell; return 1 if one failed."""
    with TemporaryDirectory() as folder:
        here = Path(folder)
        checkout = copy_checkout(here / "checkout")
        run(BIN / "uv", "build", "--quiet", "--wheel", "--out-dir", here, cwd=checkout)
        (wheel,) = here.glob("*.whl")
        # without the packages beside them, which would be imported in place of the wheel's
        (here / "run").mkdir()
        (checkout / "tests").rename(here / "run" / "tests")
        return max(_test(cell, wheel, here / "run") for cell in cells)


def _test(cell: str, wheel: Path, folder: Path) -> int:
    python, _, flower = cell.partition(":")
    with TemporaryDirectory() as place:
        interpreter = Path(place, "bin", "python")
        run(BIN / "uv", "venv", "--quiet", "--python", python, place)
        override = Path(place, "override.txt")
        override.write_text(OVERRIDE)
        needed = (f"fedbn-flwr @ {wheel.as_uri()}", f"flwr=={flower}", "pytest", "hypothesis")
        run(
            BIN / "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            interpreter,
            "--override",
            override,
            *needed,
        )
        tested = subprocess.run(
            [
                interpreter,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:warnings",
                "-m",
                "not slow",
                "--deselect",
                LEFT_OUT,
                *TESTS,
            ],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
        )
        last = (tested.stdout or tested.stderr).splitlines()[-1]
        print(f"Python {python}, Flower {flower}: {last}", flush=True)
        if tested.returncode:
            print(tested.stdout, tested.stderr, sep="\n")
        return min(tested.returncode, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
