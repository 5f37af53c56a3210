"""What users add under a name: items of a registry, their own objects in the place of names, and
modules to import.
"""

import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

#: a name that neither `STRATEGY+NORM:key=value` nor `name:argument` can misread
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def add(
    items: dict[str, Any],
    kind: str,
    name: str,
    item: Any,
    source: Callable[[Any], Any] = lambda item: item,
) -> None:
    """Add an item under a name of its own; a name that is not possible, or taken, is a ValueError.

    `source` returns the class or function behind an item. One that is defined again under its own
    name, as in a notebook, takes the place of the one before.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r}: a name has lower-case letters, digits and single hyphens, like "
            f"my-{kind}"
        )
    if name in items and not same_definition(source(items[name]), source(item)):
        raise ValueError(f"{kind} {name!r} is there already; known: {', '.join(items)}")
    items[name] = item


def same_definition(one: Any, other: Any) -> bool:
    """Whether two classes or functions are the same, or come from the same place under the same
    name.
    """
    if one is other:
        return True
    places = [
        (getattr(item, "__module__", None), getattr(item, "__qualname__", "<lambda>"))
        for item in (one, other)
    ]
    return places[0] == places[1] and not places[0][1].endswith("<lambda>")


#: the modules that the user has named as plugins in this process: only what these hold may a file
#: name
TRUSTED = set[str]()


def load_plugins(modules: str) -> None:
    """Import comma-separated modules, each once a process.

    One that cannot be imported is a ValueError.
    """
    for name in filter(None, (part.strip() for part in modules.split(","))):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"plugins: {name!r} is not the name of a module, as in my_package.methods"
            )
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"plugins: cannot import {name!r}: {error}") from error
        TRUSTED.add(name)


#: how alike two names are, from 0 to 1, to count as a slip: `fedsgd` and `fedbs` are not, at 0.73
ALIKE = 0.75
#: more names are not listed where it can be said what shows them, but for a few that are somewhat
#: alike
MANY = 20
MOST_NEAR = 4


def did_you_mean(
    name: str,
    known: Iterable[str],
    other: str = "",
    shown: str = "",
    texts: Mapping[str, str] | None = None,
) -> str:
    """Return "did you mean ...?", or all known names if none is like this one.

    Case, hyphens, and all after a colon do not count. `other` says what may be given in place of a
    name, `shown` what shows the names if they are many: then those that are a little like it are
    named, and those in whose texts its words are.
    """
    listed = list(known)
    names = {_plain(item): item for item in listed}
    meant = get_close_matches(_plain(name), names, n=1, cutoff=ALIKE)
    if meant:
        return f"did you mean {names[meant[0]]!r}?"
    if shown and len(listed) > MANY:
        near = [names[each] for each in get_close_matches(_plain(name), names)]
        words = name.strip("-").replace("-", " ").lower()
        near += [
            each
            for each, text in (texts or {}).items()
            if words in text.lower() and each not in near
        ]
        if near:
            return f"like it: {', '.join(near[:MOST_NEAR])}; all: {shown}"
        return f"all: {shown}"
    if other and not listed:
        return f"give {other.removeprefix('or ')}"
    return f"known: {', '.join(filter(None, (*listed, other))) or 'none'}"


def _plain(name: str) -> str:
    return name.partition(":")[0].lower().replace("-", "").replace("_", "")


class MissingExtraError(ImportError):
    """A package of one of this project's extras is not installed, or cannot be imported."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import in here what an extra brings: `with extra("models"): import torchvision`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{str(error.name).partition('.')[0]} is not installed: pip install '.[{name}]' in "
            "the clone"
        ) from error
    except ImportError as error:  # such as for two versions that do not go together
        raise MissingExtraError(
            f"what the extra {name!r} installs cannot be imported: {error}"
        ) from error


@cache
def warn_once(line: str) -> None:
    """Log a warning, once a process: the methods of a comparison have the same data and model."""
    logging.getLogger("flwr").warning(line)


@dataclass(frozen=True, eq=False)
class Own:
    """An object that a user has handed over in place of a name: a function, or data.

    Tables and files show its name. It is equal to itself only.
    """

    name: str
    target: Any

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)


def import_function(kind: str, spec: str | Own, known: Iterable[str]) -> Any:
    """Return the function or class of "package.module:function", or the one handed over.

    A ValueError says what is wrong with the text.
    """
    if isinstance(spec, Own):
        return spec.target
    module_name, _, function_name = spec.partition(":")
    meant = partial(did_you_mean, spec, known, "or package.module:function")
    if not (
        function_name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))
    ):
        raise ValueError(f"unknown {kind} {spec!r}; {meant()}")
    try:
        function = getattr(import_module(module_name), function_name, None)
    except ImportError as error:
        raise ValueError(
            f"{kind} {spec!r}: cannot import {module_name!r}: {error}; {meant()}"
        ) from error
    if not callable(function):
        raise ValueError(
            f"{kind} {spec!r}: module {module_name!r} has no function {function_name!r}"
        )
    return function


def is_unicode(text: str) -> bool:
    """Return whether a text can be written in UTF-8, as not all names of files can."""
    return text.encode(errors="ignore").decode() == text


def fingerprint(text: str) -> str:
    """Return a short text that changes with a text."""
    # names of files may be none in UTF-8
    return blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def described(error: Exception) -> str:
    """Return what a user's code has raised, and where of it."""
    passed = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    own = [
        place
        for place in passed
        if not {"torch", Path(__file__).parents[1]} & {*place[0].parts, *place[0].parents}
    ]
    return f"{type(error).__name__}: {error}" + "".join(
        f" ({path}, line {line})" for path, line in own[-1:]
    )


def is_foreign(thing: Any) -> bool:
    """Return whether a function or class is not from this package: users may have packages of the
    same names.
    """
    home = Path(__file__).parents[1]
    # in a checkout, the strategies lie beside the package, which has a module in their place
    if (home / "strategies.py").exists():
        ours = [home, home.parent / "strategies"]
    else:
        ours = [home]
    file = getattr(sys.modules.get(thing.__module__), "__file__", None) or ""
    return not any(Path(file).is_relative_to(folder) for folder in ours)


def is_importable(thing: Any) -> bool:
    """Return whether another process could import a function or class: not from a notebook, a
    script or a function.
    """
    try:
        return b"__main__" not in pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
