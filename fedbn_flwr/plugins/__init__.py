"""What users add under a name: items of a registry, their own objects in the place of names, and modules to import."""

import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from types import CodeType, FunctionType
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
#: more names are not listed where it can be said what shows them, but for a few that are somewhat alike
MANY = 20


def did_you_mean(name: str, known: Iterable[str], other: str = "", shown: str = "") -> str:
    """Return "did you mean ...?", or all known names if none is like this one.

    Case, hyphens, and all after a colon do not count. `other` says what may be given in place of a name, `shown` what
    shows the names if they are many.
    """
    listed = list(known)
    names = {_plain(item): item for item in listed}
    if meant := get_close_matches(_plain(name), names, n=1, cutoff=ALIKE):
        return f"did you mean {names[meant[0]]!r}?"
    if shown and len(listed) > MANY:
        listed = [*(names[near] for near in get_close_matches(_plain(name), names)), f"... ({shown})"]
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
            f"{str(error.name).partition('.')[0]} is not installed: pip install '.[{name}]' in the clone"
        ) from error


#: values whose text says all about them
_PLAIN = (bool, int, float, str, bytes, type(None))


class Named(str):
    """The name of an object that a user has handed over: a model's function, or a data set.

    Tables and files show the text. Code that resolves the name takes `target` instead of looking the name up. It is
    equal to itself only, because another object may have the same name.
    """

    target: Any
    #: tells the object from others of its name, in another process too
    fingerprint: str

    def __new__(cls, text: str, target: Any = None, fingerprint: str = "") -> "Named":
        """Make the name of an object."""
        named = super().__new__(cls, text)
        named.target, named.fingerprint = target, fingerprint
        return named

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


def import_function(kind: str, spec: str, known: Iterable[str]) -> Any:
    """Return the function or class of "package.module:function", or that a name holds; else a ValueError."""
    if isinstance(spec, Named):
        return spec.target
    module_name, colon, function_name = spec.partition(":")
    if not colon:
        raise ValueError(f"unknown {kind} {spec!r}; {did_you_mean(spec, known, 'or package.module:function')}")
    try:
        function = getattr(import_module(module_name), function_name, None)
    except ImportError as error:
        raise ValueError(f"{kind} {spec!r}: cannot import {module_name!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{kind} {spec!r}: module {module_name!r} has no function {function_name!r}")
    return function


def fingerprint(thing: Any) -> str:
    """Return a short text that changes with the code of a function or class.

    The code is that of the function or class itself and, in the same module, of what it uses. An object that cannot be
    described is known in this process only.
    """
    return blake2b("\n".join(_parts(thing, set())).encode(), digest_size=4).hexdigest()


def is_foreign(thing: Any) -> bool:
    """Return whether a function or class is not from this package: users may have packages of the same names."""
    home = Path(__file__).parents[1]
    # in a checkout, the strategies lie beside the package, which has a module in their place
    ours = (home, home.parent / "strategies") if (home / "strategies.py").exists() else (home,)
    file = getattr(sys.modules.get(thing.__module__), "__file__", None) or ""
    return not any(Path(file).is_relative_to(folder) for folder in ours)


def is_importable(thing: Any) -> bool:
    """Return whether another process could import a function or class: not from a notebook, a script or a function."""
    try:
        return b"__main__" not in pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _parts(thing: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(thing, _PLAIN):
        yield repr(thing)
    elif isinstance(thing, tuple | list | dict | set | frozenset):
        items = thing.items() if isinstance(thing, dict) else thing
        texts = ["\n".join(_parts(item, seen)) for item in items]
        yield from sorted(texts) if isinstance(thing, set | frozenset) else texts
    elif id(thing) in seen:
        return
    else:
        seen.add(id(thing))
        yield from _described(thing, seen)


def _described(thing: Any, seen: set[int]) -> Iterator[str]:
    match thing:
        case CodeType():
            yield thing.co_code.hex()
            yield from _parts((thing.co_names, thing.co_consts), seen)
        case FunctionType():
            yield thing.__qualname__
            yield from _parts((thing.__code__, thing.__defaults__, thing.__kwdefaults__), seen)
            yield from _parts([cell.cell_contents for cell in thing.__closure__ or ()], seen)
            yield from _parts([thing.__globals__[name] for name in _used(thing)], seen)
        case type():
            yield thing.__qualname__
            for owner in (owner for owner in thing.__mro__ if _package(owner) == _package(thing)):
                own = {name: vars(owner)[name] for name in vars(owner) if not name.startswith(("__", "_abc_"))}
                if is_dataclass(owner):
                    own |= {item.name: _default(item) for item in fields(owner)}
                elif "__init__" in vars(owner):
                    own["__init__"] = vars(owner)["__init__"]
                yield from _parts(sorted(own.items(), key=itemgetter(0)), seen)
        case partial():
            yield from _parts((thing.func, thing.args, thing.keywords), seen)
        case staticmethod() | classmethod():
            yield from _parts(thing.__func__, seen)
        case property():
            yield from _parts((thing.fget, thing.fset), seen)
        case _ if is_dataclass(thing):
            yield from _parts((type(thing), vars(thing)), seen)
        case _:
            yield f"{os.getpid()}, {id(thing)}"


def _default(item: Field[Any]) -> Any:
    """Return the default of a dataclass's field, as a function by its code and as a type by its name."""
    value = item.default if item.default_factory is MISSING else item.default_factory
    return type(value).__name__ if value is MISSING else value.__qualname__ if isinstance(value, type) else value


def _used(function: FunctionType) -> list[str]:
    """Return the names of plain values, functions and classes of its own module that a function uses."""
    found = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    own = (name for name, value in found.items() if getattr(value, "__module__", None) == function.__module__)
    return sorted({*own, *(name for name, value in found.items() if isinstance(value, _PLAIN))})


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, also in functions and classes inside it."""
    inner = (_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*inner)


def _package(owner: type) -> str:
    return owner.__module__.partition(".")[0]
