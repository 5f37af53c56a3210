"""Imports point one way: fedbn_flwr <- strategies <- experiments <- apps. And the registry knows every strategy."""

import ast
import importlib
from pathlib import Path

import pytest

from fedbn_flwr.strategies import REGISTRY, FedAvg
from tests.checkout import ROOT

FLOORS = ("fedbn_flwr", "strategies", "experiments", "apps")
#: the public import paths of the upper floors: the only files of the library that look up
DOORS = {"fedbn_flwr/strategies.py": "strategies", "fedbn_flwr/experiments.py": "experiments"}
#: what is inherited from or used inside other strategies, and is no method of its own
NOT_METHODS = {"Gathering", "Layerwise", "PartialSharing"}


def files(floor: str) -> list[Path]:
    return sorted(path for path in (ROOT / floor).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The absolute names of everything that a file imports, wherever in the file; `from a import b` is a and a.b."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def absolute(path: Path) -> set[str]:
    """The first parts of a file's absolute imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return plain | {str(node.module).split(".")[0] for node in froms}


def below(names: set[str], *roots: str) -> set[str]:
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)}


@pytest.mark.parametrize("path", files("fedbn_flwr"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_looks_at_nothing_above(path: Path) -> None:
    above = ("strategies", "experiments", "apps", "fedbn_flwr.strategies", "fedbn_flwr.experiments")
    door = DOORS.get(str(path.relative_to(ROOT)))
    assert {name.split(".")[0] for name in below(imported(path), *above)} == ({door} if door else set())


@pytest.mark.parametrize("path", files("strategies"), ids=lambda path: path.name)
def test_strategies_import_the_library_and_each_other_relatively(path: Path) -> None:
    assert not below(imported(path), "experiments", "apps", "fedbn_flwr.experiments", "fedbn_flwr.strategies")
    # `from strategies.base import` works in a checkout and dies in a wheel
    assert "strategies" not in absolute(path)


@pytest.mark.parametrize("path", files("experiments"), ids=lambda path: path.name)
def test_experiments_import_strategies_by_their_public_path_and_each_other_relatively(path: Path) -> None:
    assert not below(imported(path), "strategies", "apps", "fedbn_flwr.experiments")
    assert "experiments" not in absolute(path)


@pytest.mark.parametrize("path", files("apps"), ids=lambda path: path.name)
def test_apps_import_public_paths_only(path: Path) -> None:
    assert absolute(path) & set(FLOORS) <= {"fedbn_flwr"}


def test_every_strategy_is_in_the_registry() -> None:
    methods = set()
    for path in files("strategies"):
        module = importlib.import_module(f"strategies.{path.stem}" if path.stem != "__init__" else "strategies")
        own = [item for item in vars(module).values() if getattr(item, "__module__", None) == module.__name__]
        methods |= {item.__name__ for item in own if isinstance(item, type) and issubclass(item, FedAvg)}
    registered = {strategy.__name__ for strategy in REGISTRY.values()}
    assert methods - NOT_METHODS == registered


@pytest.mark.parametrize(
    "name",
    ["fedbn_flwr.strategies", "fedbn_flwr.experiments", "fedbn_flwr.data", "fedbn_flwr.models", "fedbn_flwr.norm"],
)
def test_all_resolves(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [item for item in module.__all__ if not hasattr(module, item)] == []


def test_every_registered_strategy_is_public() -> None:
    public = importlib.import_module("fedbn_flwr.strategies").__all__
    assert [strategy.__name__ for strategy in REGISTRY.values() if strategy.__name__ not in public] == []
