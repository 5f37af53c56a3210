"""Importing users' modules, which register strategies, rules, normalizers, models, data sets and partitions."""

from importlib import import_module


def load_plugins(modules: str) -> None:
    """Import comma-separated modules, each once a process; one that cannot be imported is a ValueError."""
    for name in filter(None, (part.strip() for part in modules.split(","))):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"plugins: {name!r} is not the name of a module, as in my_package.methods")
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"plugins: cannot import {name!r}: {error}") from error
