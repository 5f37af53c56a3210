"""The folder of one run's results, written during the run."""

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from safetensors.torch import save

from fedbn_flwr import __version__
from fedbn_flwr.device import accelerator_name
from fedbn_flwr.experiments.config import shared_options
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state import from_record
from fedbn_flwr.whole_files import write_bytes
from fedbn_flwr.wire import printable

VERSIONED = ("flwr", "matplotlib", "numpy", "pillow", "ray", "scikit-learn", "torch", "torchvision")
CONFIG = "config.json"
SUMMARY = "summary.json"
#: a safetensors file for each node with the entries of its own model that differ from the server's
PERSONAL = "personal"
#: what `model.safetensors` says of itself, from the summary
ABOUT = ("mean", "std", "image-size", "class-names", "frozen")
#: said of `model.safetensors` where nodes have models of their own
NOT_WHOLE = (
    "model.safetensors has at most the mean of what nodes keep: the files in `personal` hold the "
    "entries of each node, and `export_personal` makes the model of a node elsewhere"
)


class RunFolder:
    """Folder with `config.json`, `rounds.jsonl`, `summary.json`, `model.safetensors` and
    `curves.png` of one run.

    A run that records its dynamics also has `dynamics.jsonl`, with rows for every BN layer in every
    round. If nodes have models of their own and are on this machine, `personal` has what these do
    not share.
    """

    def __init__(self, path: Path, rounds_done: int = 0) -> None:
        """With `rounds_done` the folder is that of a run that goes on after so many rounds."""
        self.path = make_folder(path)
        self.rounds_done = rounds_done
        self._rounds = path / "rounds.jsonl"
        self._dynamics = path / "dynamics.jsonl"
        self._keep_rounds(rounds_done)
        self._keep_dynamics(rounds_done)
        # if this run fails, its folder must not show the results of an earlier run
        for stale in (SUMMARY, "model.safetensors", "curves.png"):
            (path / stale).unlink(missing_ok=True)
        shutil.rmtree(path / PERSONAL, ignore_errors=True)

    def config(
        self,
        options: Mapping[str, Any],
        asked: Mapping[str, Any],
        sites: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write the options, versions, command and machine, which are needed to repeat the run, and
        sites' data.

        `asked` is what makes the run; the options are what its data made of it.
        """
        versions = installed_versions(VERSIONED) | {
            "fedbn-flwr": __version__,
            "python": platform.python_version(),
        }
        device = accelerator_name(options["device"]) or _processor()
        machine = {"hardware": device, "cores": os.cpu_count(), "system": platform.platform()}
        content: dict[str, Any] = {
            "options": dict(options),
            "asked": dict(asked),
            "versions": versions,
            **machine,
        }
        content["command"] = command_line()
        if sites:
            content["sites"] = list(sites)
        write_json(self.path / CONFIG, content)

    def round(self, row: Mapping[str, Any]) -> None:
        """Append the row of one round."""
        with self._rounds.open("a") as file:
            file.write(as_json(row) + "\n")

    def dynamics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows of one round about the BN layers."""
        lines = [as_json(row) + "\n" for row in rows]
        if lines:
            with self._dynamics.open("a") as file:
                file.writelines(lines)

    def finish(self, summary: Mapping[str, Any], arrays: ArrayRecord | None) -> None:
        """Write the model, if a round made one, and what it is.

        The summary comes last, as a sign of the end.
        """
        if arrays is not None:
            about = {key: summary[key] for key in ABOUT if key in summary}
            if summary.get("model-for-each-node"):
                about["note"] = NOT_WHOLE
            # one entry, because safetensors writes several in any order
            write_bytes(
                self.path / "model.safetensors",
                save(from_record(arrays), {"about": as_json(about)}),
            )
        write_json(self.path / SUMMARY, summary)

    def _keep_rounds(self, count: int) -> None:
        """Cut the rows after so many rounds: their rounds will be repeated, and the last row may
        not be whole.
        """
        rows = _lines(self._rounds)[:count]
        if [_round_of(row) for row in rows] != list(range(1, count + 1)):
            raise UsageError(f"{self._rounds} does not have the rows of the first {count} rounds")
        write_bytes(self._rounds, b"".join(rows))

    def _keep_dynamics(self, count: int) -> None:
        kept = [row for row in _lines(self._dynamics) if (_round_of(row) or count + 1) <= count]
        if kept:
            write_bytes(self._dynamics, b"".join(kept))
        else:
            self._dynamics.unlink(missing_ok=True)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages.

    Those that are not installed, such as extras, are left out.
    """
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def command_line() -> str:
    """Return the command of this process as typed, without its program's folder and without
    Flower's task token.
    """
    text = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return re.sub(r"(--token[ =])\S+", r"\1...", text)


def as_json(content: object, indent: int | None = None) -> str:
    """Return JSON; a number that is not finite, such as the loss of a run that diverged, is
    null.
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def write_json(path: Path, content: object) -> None:
    """Write a file that is whole at every moment.

    One with this content stays, also where nothing can be written.
    """
    data = (as_json(content, indent=2) + "\n").encode()
    if not path.is_file() or path.read_bytes() != data:
        write_bytes(path, data)


def make_folder(path: Path, option: str = "") -> Path:
    """Make a folder for results, or that of an option, if it does not exist.

    A UsageError says why it cannot be.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option or f'results-dir {str(path)!r}'} cannot be made: {error.strerror}"
        ) from error
    refuse_links(path)
    return path


def refuse_links(folder: Path) -> None:
    """Refuse a folder with a link in it or below it: what is written there would be written where
    the link points.
    """
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if Path(place, name).is_symlink():
                raise UsageError(
                    f"{Path(place, name)} is a link, and results are not written through links: "
                    "remove it"
                )


def read_rounds(path: Path, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
    """Return the whole rows that a run has written so far; none if it has not begun."""
    return [
        cleaned(json.loads(line)) for line in _lines(path / name) if _round_of(line) is not None
    ]


def read_json(path: Path) -> Any:
    """Return the content of a file; None if it is not there, or not whole."""
    try:
        return cleaned(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a run's `config.json`.

    It is empty before the run began, and if the file is not as one is written.
    """
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict):
        return {}
    asked = content.get("asked", {})
    parts = [asked, content.get("options", {}), content.get("versions", {})]
    if isinstance(asked, dict):
        parts += [asked.get(key, {}) for key in ("options", "files", "choice")]
    is_whole = all(isinstance(part, dict) for part in parts)
    if is_whole and _are_options(parts[1]) and _are_options(parts[3]):
        return content
    return {}


def _are_options(values: Mapping[str, Any]) -> bool:
    """Return whether all shared options among these have values that they can have."""
    known = shared_options()
    try:
        for key in values.keys() & known.keys():
            if not isinstance(values[key], bool | int | float | str):
                return False
            known[key].read(values[key])
    except UsageError:
        return False
    return True


def _processor() -> str:
    """Return the name of the processor, as far as the system tells."""
    names = list[str]()
    with suppress(OSError):
        names = re.findall(
            r"^model name\s*: *(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    return next(iter(names), platform.processor()) or "cpu"


def _lines(path: Path) -> list[bytes]:
    if path.exists():
        return path.read_bytes().splitlines(keepends=True)
    return []


def _round_of(row: bytes) -> int | None:
    """Return the round that a row is of; None if it is no row, or is written just now."""
    try:
        if row.endswith(b"\n"):
            return int(_finite(json.loads(row))["round"])
        return None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def cleaned(content: Any) -> Any:
    """Return what a file holds, which may be another's: numbers that are not finite are None, texts
    can be shown.
    """
    if isinstance(content, Mapping):
        return {cleaned(key): cleaned(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [cleaned(value) for value in content]
    if isinstance(content, str):
        return printable(content, len(content))
    return _finite(content)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not isfinite(content):
        return None
    return content
