"""The files of recipes: `read_recipe` reads one by name or by path, and a matrix keeps a copy of its own."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from fedbn_flwr.experiments.output.run_folder import make_folder, read_json, write_json
from fedbn_flwr.experiments.recipes.matrix import Results
from fedbn_flwr.experiments.recipes.recipe import Recipe
from fedbn_flwr.experiments.recipes.schema import parse_recipe
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state.record_files import write_bytes

#: the name of a recipe that is a file of a user's own
SUFFIXES = (".yaml", ".yml")
RECIPE, MATRIX, RESULTS = "recipe.yaml", "matrix.json", "results.json"


def recipes_folder() -> Path:
    """Return the folder of the papers' recipes: inside the package in a wheel, at the root of a checkout."""
    here = Path(__file__).resolve()
    places = [here.parents[2] / "recipes", here.parents[3] / "recipes"]
    return next((place for place in places if place.is_dir()), places[0])


def recipe_names() -> list[str]:
    """Return the names of the papers' recipes, as in `fixbn/table5`, by paper and number."""
    paths = recipes_folder().glob("*/*.yaml")
    return sorted((f"{path.parent.name}/{path.stem}" for path in paths), key=_order)


def recipe_path(name: str) -> Path:
    """Return the file of a paper's recipe, or of a user's own, which is named by its path."""
    if name.endswith(SUFFIXES):
        return Path(name).expanduser()
    if name not in recipe_names():
        raise UsageError(f"unknown recipe {name!r}; `fedbn-flwr recipes` lists them; your own file must end in .yaml")
    return recipes_folder() / f"{name}.yaml"


def read_recipe(name: str) -> Recipe:
    """Read a recipe of a paper by its name, or one of a user's own by the path of its file."""
    path = recipe_path(name)
    name = path.stem if name.endswith(SUFFIXES) else name
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {name}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {name}: is not YAML: {error}") from error
    return parse_recipe(name, content)


def check_recipe(recipe: Recipe) -> None:
    """Resolve every cell, at full size and in small, without reading data; a UsageError names what cannot be."""
    for form in (recipe, recipe.in_small()) if recipe.smoke else (recipe,):
        for setting, method in form.cells():
            form.experiment(setting, method)


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


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, number = name.partition("/")
    kind = number.rstrip("0123456789").rstrip("ABCDEFGHIJKLMN")
    digits = number[len(kind) :]
    return paper, kind, int(digits) if digits.isdecimal() else 1000, digits
