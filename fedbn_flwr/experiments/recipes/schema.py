"""The keys of a recipe's file, and the reading of each kind of value with one clear line for a wrong one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from fedbn_flwr.experiments.choice import Grid
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.method import all_options
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError, options_of, whole_number

#: the keys of a recipe
KEYS = (
    "place",
    "about",
    "options",
    "methods",
    "vary",
    "leave-out",
    "seeds",
    "grid",
    "lr-grid",
    "quantities",
    "reported",
    "directions",
    "notes",
    "smoke",
)
#: the keys of its `smoke`
SMOKE_KEYS = ("options", "methods", "vary", "seeds", "grid", "lr-grid")

Options = dict[str, Any]


class Fields:
    """A mapping of a recipe's file, whose values are read by kind."""

    def __init__(self, where: str, content: object, keys: Collection[str]) -> None:
        self.where = where
        if not isinstance(content, Mapping):
            self.refuse(f"must be a mapping of {', '.join(keys)}")
        self._content = {str(key): value for key, value in content.items()}
        if unknown := [key for key in self._content if key not in keys]:
            self.refuse(f"unknown key {unknown[0]!r}; known: {', '.join(keys)}")

    def refuse(self, reason: str) -> NoReturn:
        """Raise a UsageError that names this mapping."""
        raise UsageError(f"{self.where}: {reason}")

    def get(self, key: str) -> Any:
        """Return a value as the file has it; None if it has none."""
        return self._content.get(key)

    def part(self, key: str, keys: Collection[str]) -> "Fields | None":
        """Return a mapping inside this one."""
        value = self.get(key)
        return None if value is None else Fields(f"{self.where}: {key}", value, keys)

    def parts(self, key: str, keys: Collection[str]) -> list["Fields"]:
        """Return a list of mappings."""
        return [Fields(f"{self.where}: {key} {n}", item, keys) for n, item in enumerate(self._list(key), start=1)]

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self._content.get(key, default)
        if not isinstance(value, str):
            self.refuse(f"{key} must be text, got {value!r}")
        return " ".join(value.split())

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        return [" ".join(str(item).split()) for item in self._list(key)]

    def whole(self, key: str, default: int) -> int:
        """Return a whole number from 1 on."""
        return whole_number(f"{self.where}: {key}", self._content.get(key, default))

    def grid(self, refused: Collection[str]) -> Grid:
        """Return option -> values to choose from; `lr-grid` is the grid of earlier recipes."""
        given = {"lr": self._list("lr-grid")} if "lr-grid" in self._content else self.get("grid") or {}
        if not isinstance(given, Mapping):
            self.refuse(f"grid must be a mapping of options to lists of values, got {given!r}")
        grid = {str(key): values if isinstance(values, list) else [values] for key, values in given.items()}
        for key, values in grid.items():
            for value in values:
                self._options("grid", {key: value}, refused)
                try:
                    {**options_of(Config), **all_options()}[key].read(value)
                except UsageError as error:
                    self.refuse(f"grid: {error}")
        return grid

    def names(self, key: str, known: Collection[str], default: Sequence[str]) -> list[str]:
        """Return a list of known names."""
        chosen = self.texts(key) or list(default)
        if unknown := [name for name in chosen if name not in known]:
            self.refuse(f"{key}: unknown {unknown[0]!r}; known: {', '.join(known)}")
        return chosen

    def labelled(self, key: str, required: bool = False) -> dict[str, str]:
        """Return texts by label; in a list every text is its own label."""
        value = self.get(key)
        if value is None and not required:
            return {}
        if isinstance(value, list):
            value = {str(item): item for item in value}
        if not isinstance(value, Mapping) or not value:
            self.refuse(f"{key} must be a list, or a mapping of labels, and have at least one entry")
        return {str(label): str(text) for label, text in value.items()}

    def options(self, key: str, refused: Collection[str]) -> Options:
        """Return options of a run; a UsageError names one that there is not, or that a matrix sets itself."""
        return self._options(key, self._content.get(key) or {}, refused)

    def axes(self, key: str, refused: Collection[str]) -> dict[str, dict[str, Options]]:
        """Return axis -> label -> options. In a list, and by plain values, an axis is the option of its name."""
        axes = self._content.get(key) or {}
        if not isinstance(axes, Mapping):
            self.refuse(f"{key} must be a mapping of axes")
        return {str(axis): self._axis(f"{key}: {axis}", str(axis), values, refused) for axis, values in axes.items()}

    def left_out(self, methods: Collection[str], labels: Collection[str]) -> list[tuple[Sequence[str], Sequence[str]]]:
        """Return the methods that some labels do not have."""
        parts = self.parts("leave-out", ("methods", "in"))
        return [(part.names("methods", methods, list(methods)), part.names("in", labels, ())) for part in parts]

    def _axis(self, where: str, axis: str, values: Any, refused: Collection[str]) -> dict[str, Options]:
        if isinstance(values, list):
            values = {f"{axis}={value}": value for value in values}
        if not isinstance(values, Mapping) or not values:
            self.refuse(f"{where} must be a list of values, or a mapping of labels, and have at least one entry")
        parts = {str(k): value if isinstance(value, Mapping) else {axis: value} for k, value in values.items()}
        return {label: self._options(f"{where}: {label}", part, refused) for label, part in parts.items()}

    def _options(self, where: str, given: Any, refused: Collection[str]) -> Options:
        if not isinstance(given, Mapping):
            self.refuse(f"{where} must be a mapping of options")
        known = [key for key in (*Config().to_mapping(), *all_options()) if key not in refused]
        for key, value in given.items():
            if key in refused:
                self.refuse(f"{where}: {key!r} is set by the matrix")
            if key not in known:
                self.refuse(f"{where}: unknown option {key!r}; {did_you_mean(key, known)}")
            if not isinstance(value, bool | int | float | str):
                self.refuse(f"{where}: {key} must be one value, got {value!r}")
        return dict(given)

    def _list(self, key: str) -> list[Any]:
        value = self._content.get(key)
        if value is None:
            return []
        if isinstance(value, str | int | float):
            return [value]
        if not isinstance(value, list):
            self.refuse(f"{key} must be a list, got {value!r}")
        return value
