"""Options of everything that has a name, written `key=value`: their names, types and defaults come
from signatures.

Methods, data sets, augmentations, normalizers and the options that all methods share are all read
by `read_options`. A parameter with a default is an option: `mu: Annotated[float, "weight of the
proximal term", Range(0)] = 0.01`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import inf, isfinite
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from fedbn_flwr.plugins import Own, did_you_mean, is_unicode

Value = bool | int | float | str
#: options that are read before their types are known
Pairs = tuple[tuple[str, Value], ...]
#: shows more options than a line has room for
ALL_OPTIONS = "`fedbn-flwr run --help-all`"
_SPOKEN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Own: "an object of its kind",
}


class UsageError(ValueError):
    """Bad input: the message is one line that names what was wrong and what is allowed."""


@contextmanager
def refusing(about: str = "") -> Iterator[None]:
    """Refuse what is a ValueError in here as bad input, with a text in front that says what it is
    `about`.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{about}{error}") from error


class Range(NamedTuple):
    """The smallest and the largest number that an option takes, or a bound that it does not take
    itself.
    """

    low: float
    high: float = inf
    excluded: Literal["", "low", "high"] = ""

    def has(self, value: float) -> bool:
        """Return whether a number is in it."""
        if value == self.low:
            return self.excluded != "low"
        if value == self.high:
            return self.excluded != "high"
        return self.low < value < self.high

    def __str__(self) -> str:
        if self.high < inf and not self.excluded:
            return f"between {self.low:g} and {self.high:g}"
        words = "above" if self.excluded == "low" else "at least"
        text = f"{words} {self.low:g}"
        if self.high < inf:
            words = "less than" if self.excluded == "high" else "at most"
            text += f" and {words} {self.high:g}"
        return text


class Option(NamedTuple):
    """A parameter with a default, written `name: Annotated[kind, "help"] = default`."""

    name: str
    #: a type or a union of types
    kind: Any
    default: Any
    help: str = ""
    range: Range | None = None

    def read(self, value: Any) -> Any:
        """Return text or a number as the option takes it; a UsageError says what it takes."""
        return self.check(convert(option_key(self.name), value, self.kind), option_key(self.name))

    def check(self, value: Any, name: str = "") -> Any:
        """Return a value of Python's, which is not None.

        One that the option does not take is a UsageError.
        """
        name = name or self.name
        if value != inf and convert(name, value, self.kind) != value:
            raise _wrong(name, value, self.kind)
        if self.range and isinstance(value, int | float) and not self.range.has(value):
            raise UsageError(f"{name} must be {self.range}, got {value}")
        return value


def option_key(name: str) -> str:
    """Return how a parameter's name is written as an option: `local_steps` is `local-steps`."""
    return name.replace("_", "-")


def options_of(function: Callable[..., object]) -> Mapping[str, Option]:
    """Return the options of a function or class by kebab-case key: its parameters with a default
    that can be text.
    """
    return _options_of(function)


@cache
def _options_of(function: Callable[..., object]) -> Mapping[str, Option]:
    options = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.annotation is parameter.empty:
            hint = str
        else:
            hint = parameter.annotation
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if parameter.default is not parameter.empty and _is_written(kind):
            text = " ".join(note for note in notes if isinstance(note, str))
            limits = next((note for note in notes if isinstance(note, Range)), None)
            options[option_key(name)] = Option(name, kind, parameter.default, text, limits)
    return MappingProxyType(options)


def unknown_option(key: str, known: Mapping[str, Option]) -> str:
    """Return what is said of a key that none of the options has."""
    texts = {name: option.help for name, option in known.items()}
    return f"unknown option {key!r}; {did_you_mean(key, texts, shown=ALL_OPTIONS, texts=texts)}"


def read_options(
    owner: str, known: Mapping[str, Option], pairs: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """Return typed values by parameter name.

    An unknown key is a UsageError that names the owner's options.
    """
    values = {}
    for key, value in pairs:
        option = known.get(option_key(key))
        if option is None:
            raise UsageError(f"{owner}: {unknown_option(key, known)}")
        try:
            values[option.name] = option.read(value)
        except UsageError as error:
            raise UsageError(f"{owner}: {error}") from None
    return values


def read_pairs(owner: str, items: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Split each `key=value`; an item of another form, or a key that comes twice, is a
    UsageError.
    """
    seen = set()
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{owner}: {item!r} is not of the form key=value")
        if option_key(key) in seen:
            raise UsageError(f"{owner}: {key!r} is given twice")
        seen.add(option_key(key))
        yield key, value


def convert(key: str, value: Any, kind: Any) -> Any:
    """Turn text or a number into what an option takes.

    `kind` is a type, literals, a union of these, or a tuple of any length, which is written with
    commas.
    """
    if isinstance(value, str) and not is_unicode(value):
        raise UsageError(f"{key} must be a text in UTF-8, got {value!a}")
    if get_origin(kind) is tuple:
        items = value if isinstance(value, tuple) else _listed(str(value))
        if kind is Pairs:
            if all(isinstance(item, tuple) for item in items):
                return tuple(items)
            return tuple(read_pairs(key, map(str, items)))
        return tuple(convert(key, item, get_args(kind)[0]) for item in items)
    for candidate in _alternatives(kind):
        try:
            return _converted(value, candidate)
        except (ValueError, TypeError):
            continue
    raise _wrong(key, value, kind)


def whole_number(key: str, value: Any, least: int = 1) -> int:
    """Return text or a number as a whole number.

    Another one, or a smaller one than `least`, is a UsageError.
    """
    number = int(convert(key, value, int))
    if number < least:
        raise UsageError(f"{key} must be at least {least}, got {number}")
    return number


def as_given(value: Any) -> Any:
    """Return a value of Python's as options have it: numbers of other libraries as Python's,
    collections as tuples.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return tuple((str(key), as_given(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(as_given, value))
    return value


def as_value(value: Any) -> Value:
    """Return an option's value as it is written in a file: items of a tuple with commas between."""
    if isinstance(value, Own):
        return value.name
    if not isinstance(value, tuple):
        return value  # type: ignore[no-any-return]
    return ",".join(
        "=".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value
    )


def _is_written(kind: Any) -> bool:
    """Whether a command line can say it: numbers, text, true or false, and not an object of
    Python's.
    """
    if get_origin(kind) is tuple:
        return kind is Pairs or _is_written(get_args(kind)[0])
    return all(part in tuple(_SPOKEN) or isinstance(part, str) for part in _alternatives(kind))


def _alternatives(kind: Any) -> Iterator[Any]:
    """Return the types of a union, and its literals."""
    if get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _alternatives(part)
    else:
        yield from (
            part
            for part in (get_args(kind) if get_origin(kind) is Literal else (kind,))
            if part is not NoneType
        )


def _wrong(key: str, value: Any, kind: Any) -> UsageError:
    *others, last = (_SPOKEN.get(part, part) for part in _alternatives(kind))
    wanted = f"{', '.join(others)} or {last}" if others else last
    return UsageError(f"{key} must be {wanted}, got {value!r}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _converted(value: Any, kind: Any) -> Value:
    if isinstance(kind, str):  # a literal
        if value != kind:
            raise ValueError
        return kind
    if kind is bool:
        if str(value).lower() not in ("true", "false"):
            raise ValueError
        return str(value).lower() == "true"
    if isinstance(value, bool):
        raise ValueError
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    if kind is float and not isfinite(float(value)):
        raise ValueError
    return value if isinstance(value, kind) else kind(value)  # type: ignore[no-any-return]
