"""A user's object in the place of a name, and the fingerprint of its code."""

import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

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
                names = sorted(
                    name for name in vars(owner) if not name.startswith(("__", "_abc_")) or name == "__init__"
                )
                yield from _parts([(name, vars(owner)[name]) for name in names], seen)
        case partial():
            yield from _parts((thing.func, thing.args, thing.keywords), seen)
        case staticmethod() | classmethod():
            yield from _parts(thing.__func__, seen)
        case property():
            yield from _parts((thing.fget, thing.fset), seen)
        case _:
            yield f"{os.getpid()}, {id(thing)}"


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
