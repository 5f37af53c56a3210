"""Read folders of results: `rows` has a row for every run, `read_parts` also what stands beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.output.run_folder import read_json
from fedbn_flwr.experiments.recipes.schema import parse_recipe
from fedbn_flwr.experiments.results.old_folders import read_old
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.results.rows import Row, finished, frame_of, options_of_run, row_of, title_of
from fedbn_flwr.experiments.results.show import show_comparison, show_study
from fedbn_flwr.experiments.study import STUDY
from fedbn_flwr.plugins.options import UsageError

#: the keys of a recipe that is a comparison, and nothing more
OF_COMPARISONS = {"methods", "options", "seeds", "grid"}
#: options in which the settings of single runs differ: their runs share no picture, and no difference is taken
OF_SETTINGS = {"dataset": "{}", "model": "{}", "partition": "{}", "clients": "{} clients", "rounds": "{} rounds"}


@dataclass(frozen=True)
class Part:
    """The runs of a study, or runs that were given one by one."""

    title: str
    rows: Sequence[Row]
    paper: Paper = field(default_factory=Paper)
    #: the command that made it; empty if each run has its own
    command: str = ""
    #: whether the study ran in small
    is_small: bool = False

    @property
    def about(self) -> str:
        """What it is about, and where in a paper."""
        ended = finished(self.rows)
        same = len({row["setting"] for row in self.rows}) == 1
        data = title_of(ended[0]) if same and ended and "partition" in ended[0] else ""
        return ". ".join(filter(None, (self.paper.place, self.paper.about))) or data


def rows(folders: str | Path | Sequence[str | Path]) -> Any:
    """Return a `pandas.DataFrame` with a row for every run of these folders, in the order of their studies.

    Its columns are `setting`, `labels`, `label`, `method`, `seed`, `state` (finished, failed, unfinished or waiting),
    `error`, `folder`, and the keys of `summary.json`.
    """
    given = [folders] if isinstance(folders, str | Path) else folders
    return frame_of([row for part in read_parts([*map(Path, given)]) for row in part.rows])


def read_parts(folders: Sequence[Path]) -> list[Part]:
    """Read folders of results; several with a single run each become one part.

    A UsageError names a folder that holds no results.
    """
    parts, alone = list[Part](), list[Part]()
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder of results")
        part = _study(folder) if (folder / STUDY).is_file() else Part(folder.resolve().name, read_old(folder))
        if not part.rows:
            raise UsageError(f"{folder} holds no results of `fedbn-flwr run`, `compare` or `reproduce`")
        (alone if len(part.rows) == 1 and part.paper == Paper() else parts).append(part)
    if len(alone) > 1:
        alone = [Part("Runs", _together([row for part in alone for row in part.rows]))]
    return [*parts, *alone]


def _together(rows: Sequence[Row]) -> Sequence[Row]:
    """Return single runs as methods in settings; of two with one method and seed, the folders' names tell which."""
    options = [options_of_run(row) for row in rows]
    axes = [key for key in OF_SETTINGS if len({each.get(key) for each in options}) > 1]
    settings = [{key: OF_SETTINGS[key].format(each.get(key)) for key in axes} for each in options]
    runs = [
        {**row, "setting": ", ".join(labels.values()), "labels": labels}
        for row, labels in zip(rows, settings, strict=True)
    ]
    if len({(run["method"], run["setting"], run["seed"]) for run in runs}) == len(runs):
        return runs
    return [{**run, "label": Path(run["folder"]).resolve().name} for run in runs]


def _study(folder: Path) -> Part:
    try:
        study = read_json(folder / STUDY)
        title, content, command = study["title"], study["recipe"], study["command"]
        runs = [row_of(folder / run.pop("folder"), **run) for run in study["runs"]]
        if content.keys() <= OF_COMPARISONS:
            return Part(title, runs, command=command)
        recipe = parse_recipe(title, content)
        paper = replace((recipe.in_small() if study["smoke"] else recipe).paper, rounds=study["rounds"])
        return Part(title, runs, paper, command, study["smoke"])
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder / STUDY} is not the record of a study, or not whole: {error!r}") from error


def show_part(part: Part) -> None:
    """Print the table of runs, beside a paper's numbers if there is one."""
    if part.paper == Paper():
        show_comparison(part.rows)
    else:
        show_study(part.title, part.rows, part.paper)
