"""Read folders of results: `rows` has a row for every run, `read_parts` also what stands beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.experiments.output.run_folder import CONFIG, read_json
from fedbn_flwr.experiments.recipes.schema import parse_recipe
from fedbn_flwr.experiments.results import old_folders
from fedbn_flwr.experiments.results.paper import Paper
from fedbn_flwr.experiments.results.rows import Row, finished, frame_of, row_of, title_of
from fedbn_flwr.experiments.results.show import show_comparison, study_text
from fedbn_flwr.experiments.study import STUDY
from fedbn_flwr.plugins.options import UsageError

#: the keys of a recipe that is a comparison, and nothing more
OF_COMPARISONS = {"methods", "options", "seeds", "grid"}


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
    """Read folders of results; folders of single runs become one part.

    A UsageError names a folder that holds no results.
    """
    parts, single = list[Part](), list[Path]()
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder of results")
        if (folder / STUDY).is_file():
            parts.append(_study(folder))
        elif old_folders.is_matrix(folder):
            parts.append(Part(*old_folders.read_matrix(folder)))
        elif old_folders.is_comparison(folder):
            parts.append(Part(folder.resolve().name, old_folders.read_comparison(folder)))
        elif (folder / CONFIG).is_file():
            single.append(folder)
        else:
            raise UsageError(f"{folder} holds no results of `fedbn-flwr run`, `compare` or `reproduce`")
    if single:
        title = "Runs" if len(single) > 1 else single[0].resolve().name
        parts.append(Part(title, old_folders.read_runs(single)))
    return parts


def _study(folder: Path) -> Part:
    try:
        study = read_json(folder / STUDY)
        title, content = study["title"], study["recipe"]
        runs = [row_of(folder / run.pop("folder"), **run) for run in study["runs"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder / STUDY} is not the record of a study: {error}") from error
    if content.keys() <= OF_COMPARISONS:
        return Part(title, runs, command=study["command"])
    recipe = parse_recipe(title, content)
    paper = replace((recipe.in_small() if study["smoke"] else recipe).paper, rounds=study["rounds"])
    return Part(title, runs, paper, study["command"], study["smoke"])


def show_part(part: Part) -> None:
    """Print the table of runs, beside a paper's numbers if there is one."""
    if part.paper == Paper():
        show_comparison(part.rows)
    else:
        console.print(study_text(part.title, part.rows, part.paper), markup=False, highlight=False, soft_wrap=True)
