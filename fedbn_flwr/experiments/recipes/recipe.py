"""A recipe: methods and settings of one table or figure, with the numbers that a paper reports.

A recipe is a YAML file of the schema in docs/recipes.md. `read_recipe` reads one by name or by path. What the schema
does not allow is a UsageError of one line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.experiments.choice import Grid
from fedbn_flwr.experiments.method import Experiment, parse, resolve
from fedbn_flwr.experiments.recipes.quantities import QUANTITIES
from fedbn_flwr.experiments.recipes.reported import Direction, Reported, read_directions, read_reported
from fedbn_flwr.experiments.recipes.schema import KEYS, SMOKE_KEYS, Fields
from fedbn_flwr.plugins.options import UsageError

#: options that a matrix sets for every run
MATRIX_OPTIONS = ("method", "seed", "validation", "results-dir", "resume", "checkpoint-every")
#: the name of a recipe that is a file of a user's own
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Setting:
    """One column of a matrix: a label on every axis, and the options that the labels stand for."""

    #: axis -> label
    labels: Mapping[str, str]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The labels, as in the table; empty in a matrix without axes."""
        return ", ".join(self.labels.values())

    def has(self, labels: Sequence[str]) -> bool:
        """Whether all of these are labels of this setting."""
        return set(labels) <= set(self.labels.values())


@dataclass(frozen=True)
class Recipe:
    """A matrix of methods x settings x seeds, and what a paper says about it."""

    name: str
    #: the place in the paper, as printed
    place: str
    about: str
    #: label -> `STRATEGY[+NORM][:key=value]...`
    methods: Mapping[str, str]
    settings: Sequence[Setting]
    #: (methods, labels) that the matrix does not have
    left_out: Sequence[tuple[Sequence[str], Sequence[str]]]
    seeds: int
    grid: Grid
    quantities: Sequence[str]
    reported: Sequence[Reported]
    directions: Sequence[Direction]
    notes: Sequence[str]
    #: what replaces parts of the recipe for a run in small; None if there is none
    smoke: "Smoke | None" = None

    def methods_of(self, setting: Setting) -> list[str]:
        """Return the labels of the methods that run in a setting."""
        absent = {method for methods, labels in self.left_out if setting.has(labels) for method in methods}
        return [method for method in self.methods if method not in absent]

    def cells(self) -> list[tuple[Setting, str]]:
        """Return every setting with every method that runs in it, by label."""
        return [(setting, method) for setting in self.settings for method in self.methods_of(setting)]

    def experiment(self, setting: Setting, method: str, seed: int = 0) -> Experiment:
        """Resolve one run; a UsageError names the cell."""
        try:
            return resolve({**setting.options, "method": self.methods[method], "seed": seed})
        except UsageError as error:
            cell = f"{method!r} in {setting.name!r}" if setting.name else repr(method)
            raise UsageError(f"recipe {self.name}: {cell}: {error}") from None

    def in_small(self) -> "Recipe":
        """Return the same cells with the options of the recipe's `smoke`."""
        if self.smoke is None:
            raise UsageError(f"recipe {self.name} has no smoke section, so --smoke does not work")
        small = self.smoke
        settings = [
            Setting(setting.labels, {**setting.options, **small.options, **small.options_of(setting)})
            for setting in self.settings
        ]
        methods = {**self.methods, **small.methods}
        notes = [*self.notes, small.describe()]
        return replace(self, settings=settings, methods=methods, seeds=small.seeds, grid=small.grid, notes=notes)

    def only(self, labels: Sequence[str]) -> "Recipe":
        """Return the part with these methods and labels of axes; an axis of which none is named stays whole."""
        axes = {axis: dict.fromkeys(s.labels[axis] for s in self.settings) for axis in self.settings[0].labels}
        known = [*self.methods, *(label for values in axes.values() for label in values)]
        if unknown := [label for label in labels if label not in known]:
            raise UsageError(f"recipe {self.name} has no {unknown[0]!r}; it has: {', '.join(known)}")
        methods = {label: text for label, text in self.methods.items() if label in labels}
        wanted = {axis: [label for label in values if label in labels] or list(values) for axis, values in axes.items()}
        settings = [s for s in self.settings if all(s.labels[axis] in wanted[axis] for axis in wanted)]
        return replace(self, methods=methods or self.methods, settings=settings)


@dataclass(frozen=True)
class Smoke:
    """What replaces parts of a recipe for a run in small on embedded data."""

    options: Mapping[str, Any]
    #: axis -> label -> options
    vary: Mapping[str, Mapping[str, Mapping[str, Any]]]
    methods: Mapping[str, str]
    seeds: int
    grid: Grid

    def describe(self) -> str:
        """Return a sentence about what was run in place of the recipe."""
        parts = [_listed(self.options)]
        parts += [f"{label}: {_listed(part)}" for values in self.vary.values() for label, part in values.items()]
        parts += [f"{label}: {text}" for label, text in self.methods.items()]
        return f"Run in small, with {'; '.join(filter(None, parts))}. This says nothing about the paper's data."

    def options_of(self, setting: Setting) -> dict[str, Any]:
        """Return what a setting's labels stand for in small."""
        chosen: dict[str, Any] = {}
        for axis, label in setting.labels.items():
            chosen |= self.vary.get(axis, {}).get(label, {})
        return chosen


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
    return _recipe(name, Fields(f"recipe {name}", content, KEYS))


def check_recipe(recipe: Recipe) -> None:
    """Resolve every cell, at full size and in small, without reading data; a UsageError names what cannot be."""
    for form in (recipe, recipe.in_small()) if recipe.smoke else (recipe,):
        for setting, method in form.cells():
            form.experiment(setting, method)


def _recipe(name: str, given: Fields) -> Recipe:
    methods = given.labelled("methods", required=True)
    options, axes = given.options("options", MATRIX_OPTIONS), given.axes("vary", MATRIX_OPTIONS)
    settings = []
    for values in product(*(axis.items() for axis in axes.values())):
        place = dict(zip(axes, (label for label, _ in values), strict=True))
        chosen = {key: value for _, part in values for key, value in part.items()}
        settings.append(Setting(place, {**options, **chosen}))
    labels = [label for axis in axes.values() for label in axis]
    if twice := [label for label in [*methods, *labels] if [*methods, *labels].count(label) > 1]:
        given.refuse(f"the label {twice[0]!r} stands for two things")
    for method, text in methods.items():
        try:
            parse(text)
        except UsageError as error:
            given.refuse(f"methods: {method}: {error}")
    recipe = Recipe(
        name=name,
        place=given.text("place"),
        about=given.text("about"),
        methods=methods,
        settings=settings,
        left_out=given.left_out(methods, labels),
        seeds=given.whole("seeds", 1),
        grid=given.grid(MATRIX_OPTIONS),
        quantities=given.names("quantities", list(QUANTITIES), ["accuracy"]),
        reported=read_reported(given, methods, [setting.name for setting in settings]),
        directions=read_directions(given, methods, labels),
        notes=given.texts("notes"),
        smoke=_smoke(given, methods, axes),
    )
    if not recipe.cells():
        given.refuse("leave-out leaves no cell")
    return recipe


def _smoke(recipe: Fields, methods: Mapping[str, str], axes: Mapping[str, Mapping[str, Any]]) -> Smoke | None:
    given = recipe.part("smoke", SMOKE_KEYS)
    if given is None:
        return None
    vary, other = given.axes("vary", MATRIX_OPTIONS), given.labelled("methods")
    for axis, values in vary.items():
        if axis not in axes:
            given.refuse(f"vary: unknown axis {axis!r}; the recipe has: {', '.join(axes) or 'none'}")
        if unknown := [label for label in values if label not in axes[axis]]:
            given.refuse(f"vary: {axis}: unknown label {unknown[0]!r}; the recipe has: {', '.join(axes[axis])}")
    if unknown := [label for label in other if label not in methods]:
        given.refuse(f"methods: unknown label {unknown[0]!r}; the recipe has: {', '.join(methods)}")
    options = given.options("options", MATRIX_OPTIONS)
    return Smoke(options, vary, other, given.whole("seeds", 1), given.grid(MATRIX_OPTIONS))


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, number = name.partition("/")
    kind = number.rstrip("0123456789").rstrip("ABCDEFGHIJKLMN")
    digits = number[len(kind) :]
    return paper, kind, int(digits) if digits.isdecimal() else 1000, digits
