"""Named items: adding one to a dictionary, importing users' modules that do so, and what is said of a wrong name."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

#: a name that neither `STRATEGY+NORM:key=value` nor `name:argument` can misread
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def add(
    items: dict[str, Any], kind: str, name: str, item: Any, source: Callable[[Any], Any] = lambda item: item
) -> None:
    """Add an item under a name of its own; a name that is not possible, or taken, is a ValueError.

    `source` returns the class or function behind an item. One that is defined again under its own name, as in a
    notebook, takes the place of the one before.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{kind} {name!r}: a name has lower-case letters, digits and single hyphens, like my-{kind}")
    if name in items and not same_definition(source(items[name]), source(item)):
        raise ValueError(f"{kind} {name!r} is there already; known: {', '.join(items)}")
    items[name] = item


def same_definition(one: Any, other: Any) -> bool:
    """Whether two classes or functions are the same, or come from the same place under the same name."""
    if one is other:
        return True
    places = [(getattr(item, "__module__", None), getattr(item, "__qualname__", "<lambda>")) for item in (one, other)]
    return places[0] == places[1] and not places[0][1].endswith("<lambda>")


def load_plugins(modules: str) -> None:
    """Import comma-separated modules, each once a process; one that cannot be imported is a ValueError."""
    for name in filter(None, (part.strip() for part in modules.split(","))):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"plugins: {name!r} is not the name of a module, as in my_package.methods")
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"plugins: cannot import {name!r}: {error}") from error


#: how alike two names are, from 0 to 1, to count as a slip: `fedsgd` and `fedbs` are not, at 0.73
ALIKE = 0.75


def did_you_mean(name: str, known: Iterable[str], other: str = "") -> str:
    """Return "did you mean ...?", or all known names if none is like this one.

    Case, hyphens, and all after a colon do not count. `other` says what may be given in place of a name.
    """
    listed = list(known)
    names = {_plain(item): item for item in listed}
    if meant := get_close_matches(_plain(name), names, n=1, cutoff=ALIKE):
        return f"did you mean {names[meant[0]]!r}?"
    return f"known: {', '.join(filter(None, (*listed, other))) or 'none'}"


def _plain(name: str) -> str:
    return name.partition(":")[0].lower().replace("-", "").replace("_", "")


class MissingExtraError(ImportError):
    """A package of one of this project's extras is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import in here what an extra brings: `with extra("models"): import torchvision`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{str(error.name).partition('.')[0]} is not installed: pip install 'fedbn-flwr[{name}]'"
        ) from error
