"""The record of what a matrix is: a copy of its recipe, and which part of it runs and how."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedbn_flwr.experiments.output.run_folder import make_folder, read_json, write_json
from fedbn_flwr.experiments.recipes.matrix import Results
from fedbn_flwr.experiments.recipes.recipe import Recipe, read_recipe
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state.record_files import write_bytes

RECIPE, MATRIX, RESULTS = "recipe.yaml", "matrix.json", "results.json"


@dataclass(frozen=True)
class MatrixRecord:
    """What `fedbn-flwr reproduce` was asked for."""

    recipe: str
    #: whether the recipe runs in small
    smoke: bool
    #: the labels of the part that runs; empty means all
    only: Sequence[str]
    seeds: int
    workers: int
    #: rounds of the recipe at full size
    rounds: int
    command: str

    def write(self, folder: Path, source: Path) -> None:
        """Write the record and a copy of the recipe's file, before the first cell runs."""
        write_bytes(make_folder(folder) / RECIPE, source.read_bytes())
        write_json(folder / MATRIX, asdict(self))

    def read_recipe(self, folder: Path) -> Recipe:
        """Return the part of the recipe that runs, from the copy in the folder."""
        recipe = replace(read_recipe(str(folder / RECIPE)), name=self.recipe)
        recipe = recipe.in_small() if self.smoke else recipe
        return replace(recipe.only(self.only) if self.only else recipe, seeds=self.seeds)


def is_matrix(folder: Path) -> bool:
    """Whether a folder holds the results of a matrix, or will hold them."""
    return (folder / MATRIX).is_file()


def read_matrix(folder: Path) -> tuple[MatrixRecord, Results]:
    """Return a matrix's record with the results so far; a UsageError names what cannot be read."""
    try:
        record = MatrixRecord(**json.loads((folder / MATRIX).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder / MATRIX} is not the record of a matrix: {error}") from error
    recipe = record.read_recipe(folder)
    rows = read_json(folder / RESULTS) or []
    known = {(setting.name, label) for setting, label in recipe.cells()}
    runs = {(", ".join(row["labels"].values()), row["label"]): row["runs"] for row in rows}
    return record, Results(recipe, {key: value for key, value in runs.items() if key in known})
