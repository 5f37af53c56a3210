"""One run: what was asked for, and its folder.

A finished run is read, an unfinished one goes on, nothing is replaced.

What makes a run are its options and engine, the files that options name, and the grid that its
values are chosen from. The name of its folder ends with a digest of these, and `config.json` in it
has them as `asked`. What a run becomes by its data, such as rounds for a budget or what sites agree
on, does not count. Code and data of a user's own cannot be compared, so `settle` asks what becomes
of results that they made.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from flwr.common import log

from fedbn_flwr import __version__
from fedbn_flwr.experiments.checkpoint import (
    PREFIX,
    checkpoint_round,
    clear,
    read_checkpoint,
)
from fedbn_flwr.experiments.choice import Choice
from fedbn_flwr.experiments.experiment import Experiment, resolve
from fedbn_flwr.experiments.output.recorder import Progress, Summary, diverged
from fedbn_flwr.experiments.output.run_folder import (
    CONFIG,
    SUMMARY,
    as_json,
    installed_versions,
    make_folder,
    read_config,
    read_json,
    refuse_links,
    write_json,
)
from fedbn_flwr.experiments.stopping import stoppable
from fedbn_flwr.plugins import MissingExtraError, described, fingerprint, warn_once
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.strategies import REGISTRY, CannotTrainError

#: held by the process that writes into a folder of results
LOCK = "lock"
#: where a run's folder keeps what it had before it was trained again
BEFORE = "before"
#: differing options that an error names
NAMED = 4
#: letters of a label in the name of a folder: file systems allow 255
LONGEST = 150
#: what the code that goes on with a run must have in common with the code that began it
VERSIONS = {"fedbn-flwr": __version__, **installed_versions(["torch"])}
#: said of results that nobody knows the options of
LOST = f"{CONFIG} is missing, cannot be read, or is of another version"
#: options that change neither a bit of the model nor what is measured
FREE = {
    "captured",
    "checkpoint-every",
    "connect-timeout",
    "data-root",
    "exchange-address",
    "exchange-port",
    "exchange-timeout",
    "image-workers",
    "log-to",
    "min-nodes",
    "node-timeout",
    "plugins",
    "results-dir",
    "resume",
    "state-dir",
    "timeout",
}

#: trains the nodes of an experiment, and writes its folder
Engine = Callable[[Experiment, Path, Progress | None], Summary]


def asked_of(experiment: Experiment, engine: str) -> dict[str, Any]:
    """Return what makes a run.

    Values that are chosen from a grid are not known when it is asked for.
    """
    if experiment.asked is not None:
        return dict(experiment.asked)
    choice = experiment.choice
    hidden = {*FREE}
    if choice:
        hidden |= {*choice.grid}
    options = {key: value for key, value in experiment.to_mapping().items() if key not in hidden}
    asked: dict[str, Any] = {"options": options, "engine": engine, "files": experiment.files}
    if choice:
        asked["grid"] = choice.text
    return dict(json.loads(as_json(asked)))


def setting_name(labels: Mapping[str, str]) -> str:
    """Return the name of a setting, from its label on each axis: empty if there is only one."""
    return ", ".join(labels.values())


def folder_name(text: str) -> str:
    """Return a text as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "+-=." else "_" for letter in text)[
        :LONGEST
    ]


def has_results(path: Path) -> bool:
    """Return whether a run has written something that would be lost: a row, or the summary of its
    end.
    """
    rounds = path / "rounds.jsonl"
    return finished_summary(path) is not None or (rounds.exists() and rounds.stat().st_size > 0)


def finished_summary(path: Path) -> Summary | None:
    """Return the summary of the run in a folder; None if the run has not come to its end, or
    failed.
    """
    summary = read_json(path / SUMMARY)
    if isinstance(summary, dict) and "failed" not in summary:
        return summary
    return None


@dataclass(frozen=True)
class Run:
    """An experiment, the engine that runs it, the folder of its results, and where it stands in a
    study.
    """

    experiment: Experiment
    #: the engine's name
    engine: str
    folder: Path
    #: the labels of the setting, by axis
    labels: Mapping[str, str] = field(default_factory=dict)
    #: the method's label
    label: str = ""
    #: for each combination of values to choose from, the runs on held-out data whose mean score
    #: counts
    tried: Mapping[str, Sequence["Run"]] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """The labels of the setting, as in a table; empty if there is only one."""
        return setting_name(self.labels)

    @property
    def place(self) -> dict[str, Any]:
        """Where the run stands in a table."""
        config = self.experiment.config
        method = str(config.method)
        named = {"label": self.label or method, "method": method, "seed": config.seed}
        return {"setting": self.setting, "labels": dict(self.labels), **named}

    @property
    def name(self) -> str:
        """The method and the setting by their labels, and the seed."""
        return (
            f"{' | '.join(filter(None, (self.label, self.setting)))}, seed "
            f"{self.experiment.config.seed}"
        )

    def at(self, study: Path) -> "Run":
        """Return the run with its folder in that of a study."""
        asked = asked_of(self.experiment, self.engine)
        digest = fingerprint(json.dumps(asked, sort_keys=True))
        label = folder_name("-".join(filter(None, (self.setting, self.label))))
        name = f"{label}-seed{self.experiment.config.seed}-{digest}"
        return replace(self, experiment=replace(self.experiment, asked=asked), folder=study / name)

    def finished(self) -> Summary | None:
        """Return the summary if the run came to its end."""
        return finished_summary(self.folder)

    def refuse_other_run(self) -> None:
        """Refuse a folder whose results are another run's, or that this version cannot go on with.

        That is a UsageError.
        """
        refuse_links(self.folder)
        if not has_results(self.folder):
            return
        config = read_config(self.folder)
        before = config.get("asked", {})
        if not {"options", "engine"} <= before.keys():
            raise UsageError(
                f"{self.folder} holds results of which nobody knows the options: its {LOST}"
            )
        goes_on = checkpoint_round(self.folder) and self.finished() is None
        then = _flat(before, config.get("versions", {}) if goes_on else {})
        now = _flat(asked_of(self.experiment, self.engine), VERSIONS if goes_on else {})
        # a method brings options of its own: it is what differs
        keys = [
            key
            for key in ("method", *sorted({*then, *now} - {"method"}))
            if then.get(key) != now.get(key)
        ]
        differing = [f"its {key} is {then.get(key)!r}, not {now.get(key)!r}" for key in keys]
        if differing:
            more = ""
            if len(differing) > NAMED:
                more = f"; and {len(differing) - NAMED} more"
            reason = f"{'; '.join(differing[:NAMED])}{more}"
            if self.experiment.config.results.resume:
                raise UsageError(f"{self.folder} cannot be resumed: {reason}")
            raise UsageError(
                f"{self.folder} holds another run: {reason} (give another results-dir)"
            )

    def train(self, engine: Engine, progress: Progress | None = None) -> Summary:
        """Return the summary: of the finished run in the folder, else after `engine` has made the
        missing rounds.
        """
        self.refuse_other_run()
        summary = self.finished() or engine(self._resumed(), self.folder, progress)
        clear(self.folder)
        return summary

    def train_or_fail(self, engine: Engine, progress: Progress | None = None) -> Summary:
        """Return a run's summary; of a run that fails, one with the reason, so that the others go
        on.

        A folder that is another run's stays as it is.
        """
        try:
            self.refuse_other_run()
        except UsageError as error:
            return {**self.place, "lr": self.experiment.config.training.lr, "failed": str(error)}
        try:
            return self.train(engine, progress)
        except Exception as error:
            log(INFO, "%s failed", self.folder, exc_info=error)
            is_told = isinstance(error, CannotTrainError | UsageError | OSError | MissingExtraError)
            # of a user's own code: its kind and its line
            reason = str(error) if is_told else described(error)
            return self.failed(" ".join(reason.split()) or type(error).__name__, diverged(error))

    def failed(self, reason: str, more: Mapping[str, Any]) -> Summary:
        """Return the summary of a run that failed, and write it if the run has not."""
        config = self.experiment.config
        summary = read_json(self.folder / SUMMARY) or {
            "method": str(config.method),
            "seed": config.seed,
            "lr": config.training.lr,
        }
        summary |= {"failed": reason, **more}
        try:
            write_json(make_folder(self.folder) / SUMMARY, summary)
        except (OSError, UsageError):  # a full disk: it is said in this process only
            log(WARNING, "%s cannot be written", self.folder)
        return dict(summary)

    def _resumed(self) -> Experiment:
        """Return the experiment that goes on after the run's last checkpoint, or the same if there
        is none.
        """
        if self.experiment.config.results.resume or not checkpoint_round(self.folder):
            return self.experiment
        try:
            read_checkpoint(self.folder)
        except UsageError as error:
            log(WARNING, "%s: the run begins again", error)
            return self.experiment
        return replace(self.experiment, config=self.experiment.config.but(resume=str(self.folder)))


def _flat(asked: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    files = {f"content of {key}": value for key, value in asked.get("files", {}).items()}
    known = {}
    if versions:
        known = {f"version of {name}": versions.get(name) for name in VERSIONS}
    return {
        **asked["options"],
        "engine": asked["engine"],
        "grid": asked.get("grid"),
        **files,
        **known,
    }


def resume(given: Mapping[str, Any], engine: str | None) -> Run:
    """Return the run that `resume` names by its folder, or that of a study with one run, with the
    options given.
    """
    folder = Path(str(given["resume"])).expanduser()
    runs = [path.parent for path in folder.glob(f"*/{CONFIG}")]
    if len(runs) == 1:
        (folder,) = runs  # of a study with one run
    read_checkpoint(folder)  # says why there is none
    config = read_config(folder)
    if "options" not in config or not {"options", "engine"} <= config.get("asked", {}).keys():
        raise UsageError(f"{folder} cannot be resumed: its {LOST}")
    # what was chosen is among the options only
    saved = {**config["options"], **config["asked"]["options"], "results-dir": str(folder)}
    asked = config["asked"]
    engine = engine or str(asked["engine"])
    name = str(saved.get("method", "")).partition(":")[0].partition("+")[0]
    if str(given.get("method")) == saved.get("method"):  # a strategy of one's own, by its name
        saved["method"] = given["method"]
    elif name not in REGISTRY and "method" not in given and not saved.get("plugins"):
        raise UsageError(
            f"{folder} was made with a strategy {name!r} of your own: name its module in plugins, "
            "or hand it over again, as in run(MyStrategy, resume=...)"
        )
    changed = {**saved, **given, "results-dir": str(folder)}
    before, now = (
        resolve(options, federation=True, read_from=str(folder)) for options in (saved, changed)
    )
    # as it was asked, but with today's files
    if asked_of(now, engine) == asked_of(before, asked["engine"]):
        try:
            choice = None
            if "choice" in asked:
                choice = Choice(**asked["choice"])
        except TypeError as error:
            raise UsageError(f"{folder} cannot be resumed: its {LOST}") from error
        now = replace(now, choice=choice, asked={**asked, "files": now.files})
    return Run(now, engine, folder)


def settle(runs: Iterable[Run], reuse: bool = False, anew: bool = False) -> None:
    """Decide what becomes of the results that runs have, before the first of them trains.

    With `anew` they are set aside. Without `reuse`, a UsageError names a folder whose results were
    made with code or data of a user's own, which may have changed since.
    """
    if reuse and anew:
        raise UsageError("reuse takes what runs left, and anew trains them again: give one of them")
    for run in [run for run in runs if has_results(run.folder)]:
        refuse_links(run.folder)
        if anew:
            set_aside(run.folder)
            continue
        own = "; ".join(run.experiment.own)
        if own and not reuse:
            raise UsageError(
                f"{run.folder} has results that were made with code or data of your own ({own}), "
                "which may have changed: --reuse takes them, --anew trains again (in Python "
                "reuse=True, anew=True)"
            )
        made = read_config(run.folder).get("versions", {})
        others = [
            f"{name} {made[name]} (now {VERSIONS[name]})"
            for name in VERSIONS
            if name in made and made[name] != VERSIONS[name]
        ]
        if others and run.finished() is not None:
            warn_once(
                f"{run.folder.parent} has finished runs of {', '.join(others)}: they are taken as "
                "they are; --anew trains them again"
            )


def set_aside(folder: Path) -> None:
    """Move what a run has left into a folder of its own below the run's."""
    place = folder / BEFORE / str(len(list(folder.glob(f"{BEFORE}/*"))) + 1)
    place.mkdir(parents=True)
    # without its summary and its checkpoint, a run begins anew, wherever this process ends
    ends = (SUMMARY, *sorted(path.name for path in folder.glob(f"{PREFIX}*")))
    others = sorted(
        path.name for path in folder.iterdir() if path.name not in (*ends, BEFORE, LOCK)
    )
    for name in (*ends, *others):
        if (folder / name).exists():
            (folder / name).rename(place / name)


def every(runs: Iterable[Run]) -> list[Run]:
    """Return runs with those by which their values are chosen."""
    tried = [each for run in runs for several in run.tried.values() for each in several]
    return list({run.folder: run for run in (*runs, *tried)}.values())


def progress_of(runs: Sequence[Run]) -> str:
    """Return how many runs are finished, and how far the others have come.

    The text is empty if none has results.
    """
    finished = [run for run in runs if run.finished() is not None]
    parts = []
    if finished:
        parts = [f"{len(finished)} of {len(runs)} runs finished"]
    for run in runs:
        if run not in finished and has_results(run.folder):
            done = checkpoint_round(run.folder)
            goes_on = f"goes on after round {done} of {run.experiment.config.rounds}"
            parts.append(
                f"{run.folder.name} {goes_on if done else 'begins again, as it has no checkpoint'}"
            )
    return ", ".join(parts)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder of results, so that no other process writes into it; a UsageError if one does.

    A new folder in which nothing was written is removed again if the work fails.
    """
    is_new = not folder.exists()
    # what is finished can be read, and whatever writes says so
    if not os.access(make_folder(folder), os.W_OK):
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
def keeping(
    folder: Path, runs: Sequence[Run], reuse: bool = False, anew: bool = False
) -> Iterator[None]:
    """Hold the folder of these runs, and say what it has, and what is kept where the work ends
    before its end.

    `reuse` and `anew` are as in `settle`.
    """
    with alone_in(folder), stoppable(at_once=any(run.engine == "ray" for run in runs)):
        settle(every(runs), reuse, anew)
        had = progress_of(runs)
        if had:
            print(f"{folder}: {had}")
        try:
            yield
        except KeyboardInterrupt:
            print(f"fedbn-flwr: stopped; {_kept(folder, runs)}", file=sys.stderr)
            raise
        except OSError as error:
            raise CannotTrainError(f"{error}; {_kept(folder, runs)}") from error


def _kept(folder: Path, runs: Sequence[Run]) -> str:
    kept = progress_of(runs) or "nothing yet, as no round has ended"
    return f"kept in {folder}: {kept}; run the same again to go on"
