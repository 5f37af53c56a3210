"""Folders of results as a `pandas.DataFrame`: `rows` has a row for every run, `read_parts` what
stands beside them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.output.run_folder import (
    CONFIG,
    SUMMARY,
    read_config,
    read_json,
    read_rounds,
)
from fedbn_flwr.experiments.recipes.paper import Paper
from fedbn_flwr.experiments.recipes.schema import parse_recipe
from fedbn_flwr.experiments.runs import FREE, setting_name
from fedbn_flwr.experiments.study import STUDY
from fedbn_flwr.plugins import extra
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.transports.counting_grid import MEGABYTE

#: a `pandas.DataFrame`
Frame = Any
#: what a run can have come to; an unfinished one runs, or was interrupted
STATES = ("finished", "failed", "unfinished", "waiting")
#: the columns of a method in a setting
CELL = ["setting", "label"]
#: the keys of a recipe that is a comparison, and nothing more
OF_COMPARISONS = {"methods", "options", "seeds", "grid"}
#: options in which the settings of single runs differ: their runs share no picture, and no
#: difference is taken
OF_SETTINGS = {
    "dataset": "{}",
    "model": "{}",
    "partition": "{}",
    "clients": "{} clients",
    "rounds": "{} rounds",
}


class _Pandas:
    def __getattr__(self, name: str) -> Any:
        with extra("cli"):  # takes a second to import, and a node's process never needs it
            import pandas

        return getattr(pandas, name)


pd = _Pandas()


@dataclass(frozen=True)
class Part:
    """The runs of a study, or runs that were given one by one."""

    title: str
    runs: Frame
    paper: Paper = field(default_factory=Paper)
    #: the command that made it; empty if each run has its own
    command: str = ""
    #: whether the study ran in small
    is_small: bool = False

    @property
    def about(self) -> str:
        """What it is about, and where in a paper."""
        ended = finished(self.runs)
        same = self.runs["setting"].nunique() == 1 and len(ended) and "partition" in ended
        return ": ".join(filter(None, (self.paper.place, self.paper.about))) or (
            title_of(ended.iloc[0]) if same else ""
        )


def rows(folders: str | Path | Sequence[str | Path]) -> Frame:
    """Return a `pandas.DataFrame` with a row for every run of these folders, in the order of their
    studies.

    Its columns are `setting`, `labels`, `label`, `method`, `seed`, `state` (finished, failed,
    unfinished or waiting), `error`, `folder`, and the keys of `summary.json`.
    """
    if isinstance(folders, str | Path):
        folders = [folders]
    return pd.concat([part.runs for part in read_parts([*map(Path, folders)])], ignore_index=True)


def read_parts(folders: Sequence[Path]) -> list[Part]:
    """Read folders of results; several with a single run each become one part.

    A UsageError names a folder that holds no results.
    """
    parts = list[Part]()
    alone = list[Part]()
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is {'not a folder of results' if folder.exists() else 'missing'}"
            )
        try:
            if (folder / STUDY).is_file():
                part = _study(folder)
            else:
                part = _single(folder)
        except (TypeError, KeyError, AttributeError) as error:
            text = (
                "is not the record of a study, or not whole (the command that made it writes "
                "it again)"
            )
            raise UsageError(f"{folder / STUDY} {text}") from error
        (alone if len(part.runs) == 1 and part.paper == Paper() else parts).append(part)
    if len(alone) > 1:
        alone = [
            Part("Runs", _together(pd.concat([part.runs for part in alone], ignore_index=True)))
        ]
    return [*parts, *alone]


def _study(folder: Path) -> Part:
    study = read_json(folder / STUDY)
    title = study["title"]
    content = study["recipe"]
    command = study["command"]
    runs = pd.DataFrame([row_of(folder / run.pop("folder"), **run) for run in study["runs"]])
    if runs.empty:
        raise KeyError("runs")
    if content.keys() <= OF_COMPARISONS:
        return Part(title, runs, command=command)
    recipe = parse_recipe(title, content)
    paper = (recipe.in_small() if study["smoke"] else recipe).paper
    return Part(title, runs, replace(paper, rounds=study["rounds"]), command, study["smoke"])


def _single(folder: Path) -> Part:
    """Read a run that belongs to no study, from its own files."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} holds no results of `fedbn-flwr run`, `compare` or `reproduce`")
    known = {**read_config(folder).get("options", {}), **(read_json(folder / SUMMARY) or {})}
    method = str(known.get("method") or folder.name)
    row = row_of(folder, label=method, method=method, seed=int(known.get("seed") or 0))
    return Part(folder.resolve().name, pd.DataFrame([row]))


def row_of(folder: Path, summary: Mapping[str, Any] | None = None, **place: Any) -> dict[str, Any]:
    """Return the row of one run: of its `summary`, by default that in its folder.

    `place` has its setting, labels, label, method and seed.
    """
    own = summary
    if summary is None:
        own = read_json(folder / SUMMARY)
    known = own if isinstance(own, Mapping) else {}
    error = str(known.get("failed") or known.get("error") or "")
    if error:
        state = "failed"
    elif known:
        state = "finished"
    elif read_rounds(folder):
        state = "unfinished"
    else:
        state = "waiting"
    about = {"setting": "", "labels": {}, "label": "", "method": "", "seed": 0, **place}
    about |= {"state": state, "error": error, "folder": str(folder)}
    return {**about, **known, **about}


def _together(runs: Frame) -> Frame:
    """Return single runs as methods in settings.

    Runs of a method are its seeds if they differ in nothing else; otherwise the folders' names tell
    which is which.
    """
    options = [_bound(each) for each in options_of_runs(runs)]
    axes = []
    for key in OF_SETTINGS:
        if len({each.get(key) for each in options}) > 1:
            axes.append(key)
    labels = []
    others = []
    for each in options:
        labels.append({key: OF_SETTINGS[key].format(each.get(key)) for key in axes})
        others.append(str(sorted((key, value) for key, value in each.items() if key != "seed")))
    runs = runs.assign(labels=labels, setting=[*map(setting_name, labels)])
    alike = runs.assign(others=others).groupby(CELL)["others"].nunique().max() == 1
    if alike and not runs.duplicated([*CELL, "seed"]).any():
        return runs
    return runs.assign(label=[Path(folder).resolve().name for folder in runs["folder"]])


def _bound(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in FREE}


def options_of_runs(runs: Frame) -> list[dict[str, Any]]:
    """Return the options of each run; empty before it began."""
    return [read_config(Path(folder)).get("options", {}) for folder in runs["folder"]]


def rounds_of(runs: Frame, name: str = "rounds.jsonl") -> Frame:
    """Return what runs have written about their rounds so far, each row with the index and the
    place of its run.
    """
    places = runs[[*CELL, "seed"]].to_dict("index")
    written = {run: read_rounds(Path(folder), name) for run, folder in runs["folder"].items()}
    lines = [
        {"run": run, **places[run], **row} for run, rounds in written.items() for row in rounds
    ]
    return pd.DataFrame(lines, columns=None if lines else ["run", *CELL, "seed", "round"])


def finished(runs: Frame) -> Frame:
    """Return the runs that came to their end, with the `rounds` that they made before they stopped,
    and `MB sent`.
    """
    ended = runs[runs["state"] == "finished"]
    rounds = column(ended, "stopped-after").fillna(column(ended, "rounds"))
    sent, counted = (column(ended, f"{name}-bytes") / MEGABYTE for name in ("payload", "paper"))
    return ended.assign(rounds=rounds, **{"MB sent": sent, "MB a round": counted / rounds})


def column(runs: Frame, name: str) -> Any:
    """Return a column of runs, which has nothing if no run has it."""
    if name in runs:
        return runs[name]
    return pd.Series(index=runs.index, dtype=float)


def known(value: Any) -> bool:
    """Return whether a cell of a frame has something: what is missing is NaN, which is not
    itself.
    """
    return value is not None and bool(value == value)


def score_of(runs: Frame) -> str:
    """Return the score by which methods are compared."""
    return str(next(iter(column(finished(runs), "metric").dropna()), "accuracy"))


def title_of(run: Any) -> str:
    """Return data, model, partition and clients of a run as one line."""
    return f"{run['dataset']}, {run['model']}, {run['partition']}, {run['clients']:.0f} clients"


def typical(runs: Frame) -> Any:
    """Return a run whose partition is that of the clients: the centralized reference only if it is
    alone.
    """
    federated = of_clients(runs)
    return (federated if len(federated) else runs).iloc[0]


def of_clients(runs: Frame) -> Frame:
    """Return the runs with several clients: all but the centralized reference."""
    return runs[column(runs, "partition") != "union"]


def counts(states: Sequence[str]) -> str:
    """Return how many runs are in each state."""
    number = Counter(states)
    named = [f"{number[state]} {state}" for state in STATES if number[state]]
    runs = "1 run" if len(states) == 1 else f"{len(states)} runs"
    return f"{runs}: {', '.join(named)}"


def outcome_of(run: Mapping[str, Any]) -> str:
    """Return in a few words how a run failed: `failed`, or that it diverged and when."""
    diverged = run.get("diverged")
    if known(diverged):
        return f"diverged at round {diverged:.0f}"
    return "failed"
