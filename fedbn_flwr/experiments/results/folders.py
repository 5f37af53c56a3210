"""Read folders of results: `rows` has a row for every run, `read_parts` also what stands beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.output.run_folder import CONFIG, SUMMARY, read_json
from fedbn_flwr.experiments.recipes.schema import Recipe, parse_recipe, read_recipe
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.results.rows import Row, finished, frame_of, options_of_run, row_of, title_of
from fedbn_flwr.experiments.results.show import show_comparison, show_study
from fedbn_flwr.experiments.runs import FREE, folder_name, setting_name
from fedbn_flwr.experiments.study import STUDY
from fedbn_flwr.plugins.options import UsageError

#: what older versions wrote of a matrix: what was asked for, and the recipe
MATRIX, RECIPE = "matrix.json", "recipe.yaml"
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
        name = STUDY if (folder / STUDY).is_file() else MATRIX
        try:
            part = _study(folder) if name == STUDY else _older(folder)
        except (TypeError, KeyError, AttributeError) as error:
            text = "is not the record of a study, or not whole (the command that made it writes it again)"
            raise UsageError(f"{folder / name} {text}") from error
        if not part.rows:
            raise UsageError(f"{folder} holds no results of `fedbn-flwr run`, `compare` or `reproduce`")
        (alone if len(part.rows) == 1 and part.paper == Paper() else parts).append(part)
    if len(alone) > 1:
        alone = [Part("Runs", _together([row for part in alone for row in part.rows]))]
    return [*parts, *alone]


def _together(rows: Sequence[Row]) -> Sequence[Row]:
    """Return single runs as methods in settings.

    Runs of a method are its seeds if they differ in nothing else; otherwise the folders' names tell which is which.
    """
    options = [{key: value for key, value in options_of_run(row).items() if key not in FREE} for row in rows]
    axes = [key for key in OF_SETTINGS if len({each.get(key) for each in options}) > 1]
    settings = [{key: OF_SETTINGS[key].format(each.get(key)) for key in axes} for each in options]
    runs = [
        {**row, "setting": setting_name(labels), "labels": labels} for row, labels in zip(rows, settings, strict=True)
    ]
    first = dict[tuple[Any, ...], Mapping[str, Any]]()
    for run, own in zip(runs, options, strict=True):
        others = {key: value for key, value in own.items() if key != "seed"}
        alike = first.setdefault((run["method"], run["setting"]), others) == others
        if not alike or first.setdefault((run["method"], run["setting"], run["seed"]), run) is not run:
            return [{**run, "label": Path(run["folder"]).resolve().name} for run in runs]
    return runs


def _study(folder: Path) -> Part:
    study = read_json(folder / STUDY)
    title, content, command = study["title"], study["recipe"], study["command"]
    runs = [row_of(folder / run.pop("folder"), **run) for run in study["runs"]]
    if content.keys() <= OF_COMPARISONS:
        return Part(title, runs, command=command)
    paper = _form(parse_recipe(title, content), study).paper
    return Part(title, runs, replace(paper, rounds=study["rounds"]), command, study["smoke"])


def _form(recipe: Recipe, asked: Mapping[str, Any]) -> Recipe:
    return recipe.in_small() if asked["smoke"] else recipe


def _older(folder: Path) -> Part:
    """Return the runs of a folder without `study.json`: of an older version, or a single one; none may be there."""
    title = folder.resolve().name
    if (folder / CONFIG).is_file():
        return Part(title, [_row(folder)])
    if not (asked := read_json(folder / MATRIX)):
        return Part(title, [_row(path.parent) for path in sorted(folder.glob(f"*-seed*/{CONFIG}"))])
    recipe, rows = _form(read_recipe(str(folder / RECIPE)), asked), list[Row]()
    recipe = recipe.only(asked["only"]) if asked["only"] else recipe
    for setting, label in recipe.study.cells():
        method, base = recipe.study.methods[label], int(setting.options.get("seed", 0))
        for seed in range(base, base + asked["seeds"]):
            place = folder / (folder_name(setting.name) or "runs") / f"{folder_name(method)}-seed{seed}"
            at: dict[str, Any] = {"setting": setting.name, "labels": setting.labels, "label": label}
            rows.append(row_of(place, **at, method=method, seed=seed))
    return Part(title, rows, replace(recipe.paper, rounds=asked["rounds"]))


def _row(folder: Path) -> Row:
    """Return the row of a run that only its own files tell of."""
    known = {**options_of_run({"folder": folder}), **(read_json(folder / SUMMARY) or {})}
    method = str(known.get("method") or folder.name)
    return row_of(folder, label=method, method=method, seed=int(known.get("seed") or 0))


def show_part(part: Part) -> None:
    """Print the table of runs, beside a paper's numbers if there is one."""
    if part.paper == Paper():
        show_comparison(part.rows)
    else:
        show_study(part.title, part.rows, part.paper)
