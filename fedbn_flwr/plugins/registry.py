"""Adding an item to a dictionary of named items."""

import re
from collections.abc import Callable
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
