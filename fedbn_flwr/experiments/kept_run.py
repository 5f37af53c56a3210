"""The one way from an experiment to its folder: a finished run is kept, an unfinished one goes on, another is refused.

`fedbn-flwr run`, `compare` and `reproduce` take it for every run. What makes a run are its options and engine, users'
code and data, and what its values were chosen from. `config.json` in a run's folder has these. Whoever asks whether a
folder holds a run, whether the run has finished, and what becomes of it if another run takes its place, asks here.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout
from flwr.common import log

from fedbn_flwr import __version__
from fedbn_flwr.data import SITES
from fedbn_flwr.experiments.checkpoint import AUTOMATIC, checkpoint_round, clear, read_checkpoint
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.output.recorder import Progress, Summary, diverged
from fedbn_flwr.experiments.output.run_folder import (
    CONFIG,
    as_json,
    installed_versions,
    make_folder,
    read_json,
    read_rounds,
)
from fedbn_flwr.experiments.resources import rounds_within_budget
from fedbn_flwr.experiments.results.pictures import draw_or_warn
from fedbn_flwr.experiments.results.rows import title_of
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.strategies import CannotTrainError

#: how Python says that a run is replaced; the command has an option
OVERWRITE = "overwrite=True"
#: held by the process that writes into a folder of results
LOCK = "lock"
#: differing options that an error names
NAMED = 4
#: what a run writes beside checkpoints; that the folder has a run at all is told by its options, the last
FILES = ("summary.json", "model.safetensors", "curves.png", "rounds.jsonl", "dynamics.jsonl", "tensorboard", "states")
#: holds the results of a run until the run that replaces it has finished
REPLACED = "replaced"
#: what the code that goes on with a run must have in common with the code that began it
VERSIONS = {"fedbn-flwr": __version__, **installed_versions(["torch"])}
#: said of results that nobody knows the options of
LOST = f"{CONFIG} is missing or cannot be read"
#: options that change neither a bit of the model nor what is measured
FREE = {
    *("checkpoint-every", "connect-timeout", "data-root", "exchange-address", "exchange-port", "exchange-timeout"),
    *("log-to", "min-nodes", "node-timeout", "plugins", "results-dir", "resume", "state-dir", "timeout"),
}

#: trains the nodes of an experiment, and writes its folder
Engine = Callable[[Experiment, Path, Progress | None], Summary]


class OtherRunError(UsageError):
    """A folder holds the results of another run."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


def options_in(folder: Path) -> dict[str, Any]:
    """Return the options of the run in a folder; empty if there are none, or they are lost."""
    config = read_json(folder / CONFIG)
    return dict(config.get("options", {})) if isinstance(config, dict) else {}


def resume(given: Mapping[str, Any], engine: str | None) -> tuple[Experiment, str]:
    """Return the experiment and the engine of a run that is resumed; options that are given must be the run's own."""
    folder = Path(str(given["resume"])).expanduser()
    read_checkpoint(folder)  # says why there is none
    if not (options := options_in(folder)):
        raise UsageError(f"{folder} cannot be resumed: its {LOST}")
    experiment = resolve({**options, **given, "results-dir": str(folder)}, federation=True)
    engine = engine or str(read_json(folder / CONFIG).get("engine", ""))
    KeptRun(experiment, engine, folder).refuse_other()
    return experiment, engine


def has_results(path: Path) -> bool:
    """Return whether a run has written something that would be lost: a row, or the summary of its end."""
    rounds = path / "rounds.jsonl"
    return finished_summary(path) is not None or (rounds.exists() and rounds.stat().st_size > 0)


def finished_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of the run in a folder; None if the run has not come to its end, or failed."""
    summary = read_json(path / "summary.json")
    return summary if isinstance(summary, dict) and "failed" not in summary else None


def set_aside(path: Path) -> None:
    """Move a run's results into the folder `replaced`, where they stay until the next run has finished.

    If the process is killed meanwhile, the next call moves the rest. A run that is there already stays if the one that
    was to replace it has not finished.
    """
    aside, partial = path / REPLACED, path / f"{REPLACED}.partial"
    if aside.exists() and finished_summary(path) is None:
        return
    shutil.rmtree(aside, ignore_errors=True)
    partial.mkdir(exist_ok=True)
    # the options last: without them the rest would be a run without a name
    for name in (*FILES, *(part.name for part in path.glob("checkpoint-*")), CONFIG):
        if (path / name).exists():
            (path / name).rename(partial / name)
    partial.rename(aside)


@dataclass(frozen=True)
class KeptRun:
    """One experiment, the engine that runs it, and the folder of its results."""

    experiment: Experiment
    #: the engine's name
    engine: str
    folder: Path
    #: whether another run in the folder is replaced, and not refused
    overwrite: bool = False
    #: options that are not known yet
    unknown: Sequence[str] = ()
    #: what the error advises that refuses another run in the folder
    remedy: str = f"{OVERWRITE} replaces it"

    @classmethod
    def of(
        cls, experiment: Experiment, engine: str, folder: Path, overwrite: bool = False, automatic: bool = False
    ) -> Self:
        """Return the run; `automatic` makes checkpoints as often as it costs little.

        Not on Ray: there nodes write their states into files, on machines that may not reach the folder.
        """
        config, unknown = experiment.config, list[str]()
        if config.clients and config.dataset != SITES:
            config = rounds_within_budget(config, config.clients)
        elif config.budget_epochs:  # the federation says how many nodes and samples there are
            unknown += ["rounds"]
        if config.dataset == SITES:  # the sites say what their images are
            unknown += ["partition", *([] if config.mean else ["mean", "std"])]
        if automatic and engine != "ray":
            config = replace(config, checkpoint_every=AUTOMATIC)
        return cls(replace(experiment, config=config), engine, folder, overwrite, unknown)

    def finished(self) -> Summary | None:
        """Return the summary if the folder holds this run, and the run came to its end."""
        return None if self.differences() else finished_summary(self.folder)

    def differences(self) -> list[str]:
        """Return in what the run in the folder differs from this one; empty if it is this one, or has no results."""
        if not has_results(self.folder):
            return []
        if not (options := options_in(self.folder)):
            return [LOST]
        config, choice = read_json(self.folder / CONFIG), self.experiment.choice
        before = {**options, "engine": config.get("engine", self.engine), "grid": config.get("grid")}
        now = {
            **json.loads(as_json(self.experiment.to_mapping())),
            "engine": self.engine,
            "grid": choice.text if choice else None,
        }
        before |= {f"code or data of {key}": value for key, value in config.get("code", {}).items()}
        now |= {f"code or data of {key}": value for key, value in self.experiment.code.items()}
        if checkpoint_round(self.folder) and finished_summary(self.folder) is None:
            before |= {f"version of {name}": config["versions"].get(name) for name in VERSIONS}
            now |= {f"version of {name}": value for name, value in VERSIONS.items()}
        hidden = {"method", *FREE, *self.unknown, *(choice.grid if choice and not choice.values else ())}
        # a method brings options of its own: it is what differs
        keys = ("method", *sorted({*before, *now} - hidden))
        return [
            f"{key} is {before.get(key)!r}, not {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
        ]

    def refuse_other(self) -> None:
        """Refuse the folder if it holds another run, unless that is to be replaced; a UsageError names what differs."""
        found = self.differences()
        if found and self.experiment.config.resume:
            raise UsageError(f"{self.folder} cannot be resumed: its {found[0]}")
        if found and not self.overwrite:
            more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
            raise OtherRunError(
                f"{self.folder} holds another run: its {'; its '.join(found[:NAMED])}{more} ({self.remedy})"
            )

    def run(self, train: Engine, progress: Progress | None = None) -> Summary:
        """Return the summary: of the finished run in the folder, else after `train` has made the missing rounds."""
        self.refuse_other()
        summary = self.finished()
        if summary is None:
            if self.differences():
                set_aside(self.folder)
            summary = train(self.resumed(), self.folder, progress)
        clear(self.folder)
        if not (self.folder / "curves.png").exists():
            curves = {str(summary["method"]): [read_rounds(self.folder)]}
            draw_or_warn(curves, self.folder / "curves.png", title_of(summary))
        for replaced in self.folder.glob(f"{REPLACED}*"):
            shutil.rmtree(replaced, ignore_errors=True)
        return summary

    def run_or_error(self, train: Engine, progress: Progress | None = None) -> Summary:
        """Return a run's summary; of a run that fails, the reason, so that the others go on."""
        try:
            return self.run(train, progress)
        except OtherRunError:
            raise
        except Exception as error:
            log(INFO, "%s failed", self.folder, exc_info=error)
            config = self.experiment.config
            named = {"method": config.method, "seed": config.seed, "lr": config.lr}
            return {**named, "error": " ".join(str(error).split()) or type(error).__name__, **diverged(error)}

    def resumed(self) -> Experiment:
        """Return the experiment that goes on after the run's last checkpoint, or the same if there is none."""
        if self.experiment.config.resume or not checkpoint_round(self.folder):
            return self.experiment
        try:
            read_checkpoint(self.folder)
        except UsageError as error:
            log(WARNING, "%s: the run begins again", error)
            return self.experiment
        return replace(self.experiment, config=replace(self.experiment.config, resume=str(self.folder)))


def progress_of(runs: Sequence[KeptRun]) -> str:
    """Return how many runs are finished, and how far the others have come; empty if none has results."""
    finished = [run for run in runs if run.finished() is not None]
    begun = [run for run in runs if run not in finished and has_results(run.folder) and not run.differences()]
    parts = [f"{len(finished)} of {len(runs)} runs finished"] if finished else []
    for run in begun:
        round_ = checkpoint_round(run.folder)
        parts.append(f"{run.folder.name} goes on after round {round_} of {run.experiment.config.rounds}")
    return ", ".join(parts)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder of results, so that no other process writes into it; a UsageError if one does.

    A new folder in which nothing was written is removed again if the work fails.
    """
    is_new = not folder.exists()
    if not os.access(make_folder(folder), os.W_OK):  # what is finished can be read, and whatever writes says so
        yield
        return
    try:
        held = FileLock(folder / LOCK, timeout=0).acquire()
    except Timeout:
        raise UsageError(f"another process is running in {folder}") from None
    with held:
        try:
            yield
        except BaseException:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
            raise


@contextmanager
def keeping(folder: Path, runs: Sequence[KeptRun]) -> Iterator[None]:
    """Hold the folder of these runs; say what it has, and what is kept where the work ends before its end."""
    with alone_in(folder), _interrupted_by_sigterm():
        for run in runs:
            run.refuse_other()
        if had := progress_of(runs):
            print(f"{folder}: {had}")
        try:
            yield
        except KeyboardInterrupt:
            print(f"fedbn-flwr: stopped; {_kept(folder, runs)}", file=sys.stderr)
            raise
        except OSError as error:
            raise CannotTrainError(f"{error}; {_kept(folder, runs)}") from error


def _kept(folder: Path, runs: Sequence[KeptRun]) -> str:
    kept = progress_of(runs) or "nothing yet, as no round has ended"
    return f"kept in {folder}: {kept}; run the same again to go on"


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
