"""The files of recipes: where they are, and one clear line for what the schema in docs/recipes.md
does not allow.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NoReturn

from fedbn_flwr.experiments.choice import Grid
from fedbn_flwr.experiments.config import shared_options
from fedbn_flwr.experiments.experiment import refuse_code
from fedbn_flwr.experiments.method import all_options, parse
from fedbn_flwr.experiments.output.run_folder import cleaned
from fedbn_flwr.experiments.recipes.paper import (
    QUANTITIES,
    Direction,
    Number,
    Paper,
    Reported,
    Side,
)
from fedbn_flwr.experiments.study import Setting, Study
from fedbn_flwr.plugins.options import Option, UsageError, unknown_option, whole_number
from fedbn_flwr.plugins.yaml_text import load_yaml

#: the keys of a recipe, and those of its `smoke`
SMOKE_KEYS = ("options", "methods", "vary", "seeds", "grid")
KEYS = (
    "place",
    "about",
    *SMOKE_KEYS,
    "leave-out",
    "quantities",
    "reported",
    "directions",
    "notes",
    "smoke",
)
#: options that are no part of a study
OUTSIDE = ("method", "results-dir", "resume")
#: a number as printed, with or without a deviation
PRINTED = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(?:±\s*(\d+(?:\.\d+)?))?\s*")

#: the name of a recipe that is a file of a user's own
SUFFIXES = (".yaml", ".yml", ".json")

GivenOptions = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A study in a file, and what a paper says about it."""

    name: str
    #: the file's content
    content: Mapping[str, Any]
    study: Study
    paper: Paper
    #: the same cells in small; None if there is no such form
    small: "Recipe | None" = None

    def in_small(self) -> "Recipe":
        """Return the same cells as the recipe's `smoke` has them."""
        if self.small is None:
            raise UsageError(f"recipe {self.name} has no smoke section, so --smoke does not work")
        return self.small

    def only(self, labels: Sequence[str]) -> "Recipe":
        """Return the part with these methods and labels of axes.

        An axis of which none is named stays whole.
        """
        study = self.study
        axes: dict[str, dict[str, None]] = {axis: {} for axis in study.settings[0].labels}
        for setting in study.settings:
            for axis, label in setting.labels.items():
                axes[axis][label] = None
        known = [*study.methods, *chain.from_iterable(axes.values())]
        unknown = [label for label in labels if label not in known]
        if unknown:
            raise UsageError(
                f"recipe {self.name} has no {unknown[0]!r}; it has: {', '.join(known)}"
            )
        methods = {label: text for label, text in study.methods.items() if label in labels}
        settings = study.settings
        for axis, values in axes.items():
            wanted = values.keys() & {*labels}
            if wanted:
                settings = [setting for setting in settings if setting.labels[axis] in wanted]
        return replace(
            self, study=replace(study, methods=methods or study.methods, settings=settings)
        )


class Fields:
    """A mapping of a recipe's file, whose values are read by kind."""

    def __init__(self, where: str, content: object, keys: Collection[str]) -> None:
        self.where = where
        self.content = self.mapping("", content, ", ".join(keys))
        self.known("", self.content, keys, "unknown key")

    def refuse(self, reason: str) -> NoReturn:
        """Raise a UsageError that names this mapping."""
        raise UsageError(f"{self.where}: {reason}")

    def mapping(self, where: str, value: object, of: str) -> dict[str, Any]:
        """Return a mapping, whose keys may be numbers and dates, by text; refuse whatever is
        none.
        """
        if not isinstance(value, Mapping):
            self.refuse(f"{where}must be a mapping of {of}, got {value!r}")
        return {str(key): item for key, item in value.items()}

    def known(
        self,
        where: str,
        names: Collection[str],
        known: Collection[str],
        what: str,
        has: str = "known",
    ) -> None:
        """Refuse a name that is not one of those that are known."""
        unknown = [name for name in names if name not in known]
        if unknown:
            self.refuse(f"{where}{what} {unknown[0]!r}; {has}: {', '.join(known) or 'none'}")

    def parts(self, key: str, keys: Collection[str]) -> list["Fields"]:
        """Return a list of mappings."""
        return [
            Fields(f"{self.where}: {key} {n}", item, keys)
            for n, item in enumerate(self.listed(key), start=1)
        ]

    def text(self, key: str) -> str:
        """Return a text; empty if there is none."""
        value = self.content.get(key, "")
        if not isinstance(value, str):
            self.refuse(f"{key} must be text, got {value!r}")
        return " ".join(value.split())

    def listed(self, key: str) -> list[Any]:
        """Return a list; a plain value is a list of one."""
        value = self.content.get(key, [])
        if not isinstance(value, list | str | int | float):
            self.refuse(f"{key} must be a list, got {value!r}")
        return value if isinstance(value, list) else [value]

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        return [" ".join(str(item).split()) for item in self.listed(key)]

    def names(self, key: str, known: Collection[str], default: Sequence[str] = ()) -> list[str]:
        """Return a list of known names."""
        chosen = self.texts(key) or list(default)
        self.known(f"{key}: ", chosen, known, "unknown")
        return chosen

    def seeds(self) -> int:
        """Return the number of runs a method; 1 if it is not given."""
        return whole_number(f"{self.where}: seeds", self.content.get("seeds", 1))

    def methods(self) -> dict[str, str]:
        """Return methods by label; in a list every method is its own label."""
        value = self._labelled(
            "methods", self.content.get("methods"), "be a list, or a mapping of labels,", str
        )
        return {label: str(text) for label, text in value.items()}

    def options(self) -> GivenOptions:
        """Return options of all runs."""
        return self._options("options", self.content.get("options") or {})

    def axes(self) -> dict[str, dict[str, GivenOptions]]:
        """Return axis -> label -> options.

        In a list, and by plain values, an axis is the option of its name.
        """
        axes = dict[str, dict[str, GivenOptions]]()
        for axis, values in self.mapping("vary ", self.content.get("vary") or {}, "axes").items():
            where = f"vary: {axis}"
            shape = "be a list of values, or a mapping of labels,"
            parts = self._labelled(where, values, shape, lambda value, axis=axis: f"{axis}={value}")
            axes[axis] = {
                label: self._options(
                    f"{where}: {label}", part if isinstance(part, Mapping) else {axis: part}
                )
                for label, part in parts.items()
            }
        return axes

    def grid(self) -> Grid:
        """Return option -> values to choose from."""
        given = self.mapping("grid ", self.content.get("grid") or {}, "options to lists of values")
        grid = {
            key: values if isinstance(values, list) else [values] for key, values in given.items()
        }
        for key, values in grid.items():
            if not values:
                self.refuse(f"grid: {key} must have at least one value")
            for value in values:
                self._options("grid", {key: value})
                try:
                    _all_options()[key].read(value)
                except UsageError as error:
                    self.refuse(f"grid: {error}")
        return grid

    def _labelled(self, where: str, value: Any, shape: str, label: Any) -> dict[str, Any]:
        """Return a mapping as it is, and a list by labels that are made of its values."""
        if isinstance(value, list):
            value = {label(item): item for item in value}
        if not isinstance(value, Mapping) or not value:
            self.refuse(f"{where} must {shape} and have at least one entry")
        return {str(key): item for key, item in value.items()}

    def _options(self, where: str, given: Any) -> GivenOptions:
        given = self.mapping(f"{where} ", given, "options")
        known = {key: option for key, option in _all_options().items() if key not in OUTSIDE}
        # the names of options may be theirs
        refuse_code(self.where, str(given.get("plugins", "")).split(","))
        for key, value in given.items():
            if key in OUTSIDE:
                self.refuse(f"{where}: {key!r} is no option of a recipe")
            if key not in known:
                self.refuse(f"{where}: {unknown_option(key, known)}")
            if not isinstance(value, bool | int | float | str):
                self.refuse(f"{where}: {key} must be one value, got {value!r}")
        return dict(given)


def _all_options() -> dict[str, Option]:
    return {**shared_options(), **all_options()}


def parse_recipe(name: str, content: object, read_from: str = "") -> Recipe:
    """Return the recipe of a file's content; a UsageError names what the schema does not allow."""
    given = Fields(f"recipe {name}", content, KEYS)
    methods = given.methods()
    options = given.options()
    axes = given.axes()
    settings = []
    for values in product(*(axis.items() for axis in axes.values())):
        place = dict(zip(axes, (label for label, _ in values), strict=True))
        chosen = {key: value for _, part in values for key, value in part.items()}
        settings.append(Setting(place, {**options, **chosen}))
    labels = [label for axis in axes.values() for label in axis]
    twice = [label for label in [*methods, *labels] if [*methods, *labels].count(label) > 1]
    if twice:
        given.refuse(f"the label {twice[0]!r} stands for two things")
    grid = given.grid()
    varied = _varied(given, axes)
    for key in grid:
        if key in axes:
            given.refuse(f"grid: {key} is an axis, whose labels say its values")
    for method, text in methods.items():
        try:
            parsed = parse(text)
        except UsageError as error:
            given.refuse(f"methods: {method}: {error}")
        named = [*parsed.options]
        if parsed.norm:
            named.append("norm")
        for key in named:
            _refuse_varied(given, f"methods: {method}: {key}", key, varied)
    left_out = given.parts("leave-out", ("methods", "in"))
    directions = given.parts("directions", ("claim", "in", "place", "column"))
    reported = given.parts("reported", ("place", "values"))
    absent = [
        (part.names("methods", methods, list(methods)), part.names("in", labels))
        for part in left_out
    ]
    names = [setting.name for setting in settings]
    paper = Paper(
        place=given.text("place"),
        about=given.text("about"),
        quantities=given.names("quantities", QUANTITIES, ["score"]),
        reported=[_reported(part, methods, names) for part in reported],
        directions=[_direction(part, methods, labels) for part in directions],
        notes=given.texts("notes"),
    )
    study = Study(methods, settings, given.seeds(), grid, left_out=absent, read_from=read_from)
    recipe = Recipe(name, given.content, study, paper)
    if not recipe.study.cells():
        given.refuse("leave-out leaves no cell")
    if given.content.get("smoke") is None:
        return recipe
    return replace(recipe, small=_in_small(recipe, given, axes))


def _varied(given: Fields, axes: Mapping[str, Mapping[str, GivenOptions]]) -> dict[str, str]:
    """Return by option the axis that sets it."""
    varied = dict[str, str]()
    for axis, parts in axes.items():
        for key in dict.fromkeys(key for part in parts.values() for key in part):
            _refuse_varied(given, f"vary: {axis}: {key}", key, varied)
            varied[key] = axis
    return varied


def _refuse_varied(given: Fields, where: str, key: str, varied: Mapping[str, str]) -> None:
    """Refuse to set an option beside an axis: one of the two would not count, under its label."""
    if key in varied:
        given.refuse(f"{where} is set by the axis {varied[key]!r} already")


def _in_small(recipe: Recipe, whole: Fields, axes: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Return the same cells on embedded data; what a label stands for in small counts most."""
    given = Fields(f"{whole.where}: smoke", whole.content.get("smoke"), SMOKE_KEYS)
    has = "the recipe has"
    options = given.options()
    vary = given.axes()
    methods = {}
    if given.content.get("methods"):
        methods = given.methods()
    given.known("vary: ", vary, axes, "unknown axis", has)
    for axis, values in vary.items():
        given.known(f"vary: {axis}: ", values, axes[axis], "unknown label", has)
    study = recipe.study
    given.known("methods: ", methods, study.methods, "unknown label", has)
    settings = []
    for setting in study.settings:
        chosen = {**setting.options, **options}
        for axis, label in setting.labels.items():
            chosen |= vary.get(axis, {}).get(label, {})
        settings.append(Setting(setting.labels, chosen))
    parts = {
        "": options,
        **{label: part for values in vary.values() for label, part in values.items()},
    }
    texts = {}
    for label, part in parts.items():
        texts[label] = ", ".join(f"{key} {value}" for key, value in part.items())
    changes = "; ".join(
        ": ".join(filter(None, pair)) for pair in {**texts, **methods}.items() if pair[1]
    )
    note = f"Run in small, with {changes}. This says nothing about the paper's data."
    return replace(
        recipe,
        study=replace(
            study,
            methods={**study.methods, **methods},
            settings=settings,
            seeds=given.seeds(),
            grid=given.grid(),
        ),
        paper=replace(recipe.paper, notes=[*recipe.paper.notes, note]),
    )


def _reported(part: Fields, methods: Collection[str], settings: Sequence[str]) -> Reported:
    place = part.text("place")
    has = "the recipe has"
    if not place:
        part.refuse("place is missing: the page and the table or figure that the numbers come from")
    values = part.mapping("values ", part.content.get("values"), "methods")
    part.known("values: ", values, methods, "unknown method", has)
    read: dict[tuple[str, str, str], Number] = {}
    for method, of_method in values.items():
        of_settings = of_method
        if settings == [""]:
            of_settings = {"": of_method}
        by_setting = part.mapping(
            f"values: {method} ", of_settings, f"settings: {'; '.join(settings)}"
        )
        part.known(f"values: {method}: ", by_setting, settings, "unknown setting", has)
        for setting, cell in by_setting.items():
            where = ": ".join(filter(None, ("values", method, setting)))
            if isinstance(cell, Mapping):
                columns = cell
            else:
                columns = {"": cell}
            read |= {
                (method, setting, str(name)): _number(part, where, value)
                for name, value in columns.items()
            }
    return Reported(place, read)


def _number(part: Fields, where: str, value: Any) -> Number:
    if isinstance(value, bool):
        match = None
    else:
        match = PRINTED.fullmatch(str(value))
    if not match:
        part.refuse(f"{where} must be a number, or a text like '45.90 ± 6.39', got {value!r}")
    return Number(str(value).strip(), float(match[1]), float(match[2] or 0))


def _direction(part: Fields, methods: Collection[str], labels: Collection[str]) -> Direction:
    text = part.text("claim")
    sides = list[Side]()
    for side in text.split(" > "):
        method, *places = (piece.strip() for piece in side.split(" @ "))
        part.known("claim: ", [method], methods, "unknown method", "the recipe has")
        part.known("claim: ", places, labels, "unknown label", "the recipe has")
        sides.append(Side(method, places))
    if len(sides) != 2:
        part.refuse(
            f"claim must be METHOD > METHOD, or METHOD @ LABEL > METHOD @ LABEL, got {text!r}"
        )
    return Direction(
        text, part.text("place"), sides[0], sides[1], part.names("in", labels), part.text("column")
    )


def recipes_folder() -> Path:
    """Return the folder of the papers' recipes: inside the package in a wheel, at the root of a
    checkout.
    """
    here = Path(__file__).resolve()
    places = [here.parents[2] / "recipes", here.parents[3] / "recipes"]
    return next((place for place in places if place.is_dir()), places[0])


def recipe_names() -> list[str]:
    """Return the names of the papers' recipes, as in `fixbn/table5`, by paper and number."""
    paths = recipes_folder().glob("*/*.yaml")
    return sorted((f"{path.parent.name}/{path.stem}" for path in paths), key=_order)


def read_recipe(name: str) -> Recipe:
    """Read a recipe of a paper by its name, or one of a user's own by the path of its file."""
    path = recipes_folder() / f"{name}.yaml"
    read_from = ""
    if name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        read_from = "its file"
        name = path.stem
    elif name not in recipe_names():
        raise UsageError(
            f"unknown recipe {name!r}; `fedbn-flwr recipes` lists them; your own file must end in "
            ".yaml"
        )
    try:
        content = cleaned(load_yaml(path.read_text()))
    except OSError as error:
        raise UsageError(f"recipe {name}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"recipe {name}: is not YAML: {error}") from error
    return parse_recipe(name, content, read_from)


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, number = name.partition("/")
    kind = number.rstrip("0123456789").rstrip("ABCDEFGHIJKLMN")
    digits = number[len(kind) :]
    return paper, kind, int(digits) if digits.isdecimal() else 1000, digits
