"""Change the code, one line at a time, and see whether a test notices: `make mutants FILES="strategies/fedbs.py"`.

Runs mutmut on a copy of the checkout, for the named files on the tests of their rooms. A mutant that no test kills must
be listed in `tests/survivors.toml` with the reason why it changes nothing that counts, by itself or in a class of
mutants; any other one is printed, and the command fails. mutmut changes functions and the defaults of their arguments,
but neither constants of a module or a class, nor functions behind a decorator. What runs when a module is imported
has run before a mutant is switched on.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.checkout import BIN, ROOT, copy_checkout

#: lines whose mutants change only the words of a log entry or of an error
WORDS = (r"^\s*log\(", r"^\s*f?\"[^\"]*\"\s*,?\s*$", r"raise \w+\(f?\"", r"^\s*_log_once\(")
#: rooms that other rooms' tests go through, too
ALSO_TESTED_BY = {
    "strategies": (
        "tests/clientapp/test_kept_states.py",
        "tests/experiments/test_method.py",
        "tests/test_docs.py::test_a_page_that_is_written_from_the_code_is_up_to_date",
    ),
    "client/rules": ("tests/strategies", "tests/simulation/stacked", "tests/experiments/output/test_dynamics.py"),
    "server": ("tests/strategies",),
    "data": ("tests/plugins", "tests/experiments/test_plugins.py"),
    "norm": ("tests/strategies/test_norm_references.py", "tests/strategies/test_gathering.py"),
    "layerwise": (
        "tests/strategies/test_fedtan.py",
        "tests/strategies/test_carried.py",
        "tests/client/test_layerwise_step.py",
        "tests/simulation/stacked/test_stacked_batch_norm.py",
    ),
}
#: a mutant that waits for ever is ended by its test's time, and not by five times that of all its tests; with the whole
#: process, whose other threads may wait as well
WAITING = ("--timeout=120", "--timeout-method=thread")
SURVIVORS = ROOT / "tests" / "survivors.toml"


@dataclass(frozen=True)
class Survivor:
    """A mutant that no test killed: the lines that it takes away, and those that it puts in their place."""

    file: str
    before: str
    after: str


def tests_of(file: str) -> list[str]:
    """Return the test folders for a source file: the one that mirrors its room, and those that go through the room."""
    room = file.removeprefix("fedbn_flwr/").rpartition("/")[0] or "strategies"
    mirrored = Path("tests") / room
    while not (ROOT / mirrored).is_dir():
        mirrored = mirrored.parent
    also = [folder for prefix, folders in ALSO_TESTED_BY.items() if room.startswith(prefix) for folder in folders]
    return [str(mirrored), *also]


def configure(copy: Path, files: Sequence[str], tests: Iterable[str]) -> None:
    """Give the copy's pyproject.toml mutmut's settings."""
    settings = {
        "source_paths": ["fedbn_flwr", "strategies"],
        "only_mutate": list(files),
        "also_copy": sorted(path.name for path in copy.iterdir() if path.name not in ("mutants", "tests")),
        "do_not_mutate_patterns": list(WORDS),
        "pytest_add_cli_args": ["-q", "-x", "-p", "no:xdist", "-m", "not slow", *WAITING],
        "pytest_add_cli_args_test_selection": sorted(set(tests)),
    }
    lines = [f"{key} = [{', '.join(map(_quoted, values))}]" for key, values in settings.items()]
    # mutmut's own 15 lets one endless loop take minutes; on a busy machine, 2 takes slow tests for endless ones
    text = "\n[tool.mutmut]\ntimeout_multiplier = 5\n" + "\n".join(lines) + "\n"
    (copy / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + text)


def _quoted(text: str) -> str:
    return f"'{text}'"


def mutate(copy: Path, processes: int, names: Sequence[str] = ()) -> dict[str, str]:
    """Run mutmut, with so many mutants at a time, all or these; return each mutant's outcome by its name."""
    shutil.rmtree(copy / "mutants", ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command: list[str | Path] = [BIN / "mutmut", "run", "--max-children", str(processes), *names]
    with (copy / "mutmut.log").open("w") as log:
        done = subprocess.run(command, cwd=copy, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"mutmut failed:\n{(copy / 'mutmut.log').read_text()[-3000:]}")
    listed = subprocess.run(
        [BIN / "mutmut", "results", "--all", "true"], cwd=copy, capture_output=True, text=True, check=True
    )
    pairs = (line.strip().rpartition(": ") for line in listed.stdout.splitlines() if ": " in line)
    return {name: outcome for name, _, outcome in pairs if not names or name in names}


def survivor(copy: Path, file: str, name: str) -> Survivor:
    """Return what a mutant changes."""
    shown = subprocess.run([BIN / "mutmut", "show", name], cwd=copy, capture_output=True, text=True, check=True)
    body = [line for line in shown.stdout.splitlines() if not line.startswith(("---", "+++"))]
    before, after = (" ".join(line[1:].strip() for line in body if line.startswith(sign)) for sign in "-+")
    return Survivor(file, before, after)


@dataclass(frozen=True)
class Known:
    """The survivors that have a reason: single mutants, and classes of mutants whose two lines match two patterns."""

    mutants: dict[Survivor, str]
    classes: list[tuple[re.Pattern[str], re.Pattern[str], str]]

    @classmethod
    def read(cls, text: str) -> "Known":
        """Read `[[class]]`, `[[survivor]]` and their reasons."""
        content = tomllib.loads(text)
        mutants = {
            Survivor(item["file"], item["before"], item["after"]): item["reason"] for item in content["survivor"]
        }
        patterns = [
            (re.compile(item.get("before", "")), re.compile(item.get("after", "")), item["reason"])
            for item in content["class"]
        ]
        return cls(mutants, patterns)

    def reason(self, mutant: Survivor) -> str | None:
        """Return why a mutant may survive; None if it may not."""
        if mutant in self.mutants:
            return self.mutants[mutant]
        fitting = (why for old, new, why in self.classes if old.search(mutant.before) and new.search(mutant.after))
        return next(fitting, None)


def file_of(name: str, files: Sequence[str]) -> str:
    """Return the file that a mutant belongs to; its name begins with the module's."""
    modules = {file.removesuffix(".py").replace("/", "."): file for file in files}
    return next(file for module, file in modules.items() if name.startswith(f"{module}.x"))


def alive_among(outcomes: Mapping[str, str]) -> list[str]:
    """Return the mutants that no test has killed."""
    return [name for name, end in outcomes.items() if end in ("survived", "no tests")]


def run(files: Sequence[str], first: Sequence[str], processes: int) -> list[Survivor]:
    """Mutate files, print a line for each, and return the survivors that have no reason, tested or not.

    With `first`, all mutants are tried on these tests, and only those that survive without a reason on the tests of
    their rooms.
    """
    rooms = [folder for file in files for folder in tests_of(file)]
    known = Known.read(SURVIVORS.read_text())
    with TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        copy = copy_checkout(Path(folder) / "fedbn-flwr")
        configure(copy, files, first or rooms)
        outcomes = mutate(copy, processes)
        alive = alive_among(outcomes)
        changes = dict(
            zip(alive, pool.map(lambda name: survivor(copy, file_of(name, files), name), alive), strict=True)
        )
        left_over = [name for name, change in changes.items() if known.reason(change) is None]
        if first and left_over:
            configure(copy, files, rooms)
            outcomes |= mutate(copy, processes, left_over)
    left = [changes[name] for name in alive_among(outcomes)]
    unlisted = [item for item in left if known.reason(item) is None]
    for file in files:
        total = sum(file_of(name, files) == file for name in outcomes)
        surviving, without = (sum(item.file == file for item in items) for items in (left, unlisted))
        print(
            f"{file}: {total} mutants, {total - surviving} killed, {surviving - without} survive with a reason, "
            f"{without} without"
        )
    for item in known.mutants.keys() - set(left):
        if item.file in files:
            print(f"{item.file}: listed in {SURVIVORS.name}, but not among the survivors: {item.after}")
    return unlisted


def main() -> int:
    """Parse the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="source files, relative to the root of the checkout")
    parser.add_argument(
        "--first", action="append", default=[], help="test files or folders to try before the room's own"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants that are tried at a time")
    options = parser.parse_args()
    missing = [file for file in options.files if not (ROOT / file).is_file()]
    if missing:
        parser.error(
            f"there is no file {missing[0]!r}; name files relative to {ROOT.name}/, such as strategies/fedbs.py"
        )
    left = run(options.files, options.first, options.processes)
    for item in left:
        print(f"\n{item.file}\n  - {item.before}\n  + {item.after}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
