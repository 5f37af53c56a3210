"""Twelve floors: a file imports from its own room and from lower floors.

No circles. And the registry is complete.
"""

import ast
import importlib
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from fedbn_flwr.strategies import REGISTRY, FedAvg
from tests.helpers.checkout import ROOT

#: the rooms, from the lowest floor to the highest; rooms on one floor do not know each other
FLOORS = (
    # below the first floor: what users add, the accelerator, and files
    (
        "fedbn_flwr.plugins",
        "fedbn_flwr.device",
        "fedbn_flwr.whole_files",
    ),
    ("fedbn_flwr.norm", "fedbn_flwr.randomness"),
    ("fedbn_flwr.layerwise", "fedbn_flwr.state", "fedbn_flwr.models", "fedbn_flwr.data"),
    ("fedbn_flwr.wire", "fedbn_flwr.diagnosis"),
    ("fedbn_flwr.client", "fedbn_flwr.server"),
    ("fedbn_flwr.transports",),
    ("strategies",),
    ("fedbn_flwr.clientapp",),
    ("fedbn_flwr.simulation",),
    ("fedbn_flwr.doctor",),
    ("fedbn_flwr.experiments",),
    ("fedbn_flwr.deployment",),
    ("apps", "benchmarks", "fedbn_flwr.__main__"),
)
#: the experiments have floors of their own, by what comes after `fedbn_flwr.experiments.`
INNER_FLOORS = (
    # what a run is, and its files
    (
        "config",
        "choice",
        "method",
        "experiment",
        "output.run_folder",
        "recipes.paper",
        "stopping",
    ),
    ("material", "checks", "output"),
    # what becomes of it
    (
        "checkpoint",
        "runs",
        "client_side",
        "server_side",
        "engines",
        "sites",
        "study",
    ),
    ("recipes.schema",),
    ("results", "recipes.statements"),  # what its numbers say
    ("recipes", "laboratory", "diagnose", "doctor", "flower_run", "cli"),  # what users call
)
#: public import paths that stand for a room, and the package itself, which imports the experiments
#: when asked for them
DOORS = {"fedbn_flwr.strategies": "strategies", "fedbn_flwr": ""}
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: what is inherited from or used inside other strategies, and is no method of its own
NOT_METHODS = {"ClosedForm", "Layerwise", "PartialSharing"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("fedbn_flwr", "strategies", "apps", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@cache
def imported_modules(name: str) -> set[str]:
    """The project's modules that a module imports, wherever in its file, and also by a string.

    `from a import b` is a.b if that is one.
    """
    if name == "fedbn_flwr":
        return set()
    path, modules = SOURCES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            inner = {f"{module}.{alias.name}" for alias in node.names}
            modules |= {item if item in SOURCES else module for item in inner}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return {
        module
        for module in modules
        if module.split(".")[0] in {item.split(".")[0] for item in SOURCES}
    }


def room_of(module: str) -> str:
    return DOORS.get(module) or ".".join(
        module.split(".")[: 2 if module.startswith("fedbn_flwr.") else 1]
    )


def is_allowed(importer: str, imported: str) -> bool:
    """Whether both modules are in one room, or the imported one is on a lower floor."""
    if not DOORS.get(imported, imported):
        return True  # the version, which says nothing of any room
    above, below = room_of(importer), room_of(imported)
    return above == below or FLOOR_OF[below] < FLOOR_OF[above]


def test_modules_import_their_own_room_and_lower_floors() -> None:
    pairs = [(name, module) for name in SOURCES for module in sorted(imported_modules(name))]
    assert [pair for pair in pairs if not is_allowed(*pair)] == []


def test_experiments_have_floors_of_their_own() -> None:
    floor_of = {part: number for number, floor in enumerate(INNER_FLOORS) for part in floor}

    def floor(module: str) -> int:
        _, _, inner = module.partition("fedbn_flwr.experiments.")
        return floor_of[inner] if inner in floor_of else floor_of[inner.partition(".")[0]]

    packages = {f"fedbn_flwr.experiments{room}" for room in ("", ".output", ".results")}
    inside = {name for name in SOURCES if name.startswith("fedbn_flwr.experiments")} - packages
    upwards = [
        (name, up)
        for name in inside
        for up in imported_modules(name) & inside
        if floor(up) > floor(name)
    ]
    assert upwards == []


def test_the_mathematics_of_layerwise_steps_knows_no_flower() -> None:
    for name in [name for name in SOURCES if name.startswith("fedbn_flwr.layerwise")]:
        assert not re.search(r"(?m)^\s*(from|import) (flwr|grpc)\b", SOURCES[name].read_text()), (
            name
        )
        rooms = {room_of(module) for module in imported_modules(name)}
        assert rooms <= {
            f"fedbn_flwr.{name}" for name in ("layerwise", "norm", "randomness", "device")
        }, name


def test_what_only_cuda_has_is_asked_for_in_one_file_each() -> None:
    names = {
        name
        for name, path in SOURCES.items()
        if re.search(r"torch\.(backends\.)?cuda\.", path.read_text())
    }
    assert names == {"fedbn_flwr.simulation.sizing", "fedbn_flwr.client.training"}


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {name: imported_modules(name) - {name} for name in SOURCES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_room_has_a_floor_and_no_module_is_loose() -> None:
    folders = {
        f"fedbn_flwr.{path.parent.name}" for path in (ROOT / "fedbn_flwr").glob("*/__init__.py")
    }
    loose = {name for name, path in SOURCES.items() if path.parent == ROOT / "fedbn_flwr"}
    assert folders <= FLOOR_OF.keys()
    others = {f"fedbn_flwr.{name}" for name in ("__main__", "device", "randomness", "whole_files")}
    assert loose == {*DOORS, *others}


def test_the_drawn_rooms_are_these_on_their_floors() -> None:
    drawn = (ROOT / "CONTRIBUTING.md").read_text().partition("## The rooms")[2].split("```")[1]
    floors: list[set[str]] = []
    for line in drawn.strip().splitlines():
        if line[0].isdigit():
            floors.append(set())
        floors[-1] |= set(re.findall(r"(?: {2}|^\d+ +)(\w+) {2,}", line))
    names = [{room.removeprefix("fedbn_flwr.") for room in floor} for floor in FLOORS]
    assert floors[::-1] == names


def test_every_strategy_is_in_the_registry() -> None:
    methods = set()
    for name in SOURCES:
        if name.startswith("strategies"):
            module = importlib.import_module(name)
            defined = [
                item for item in vars(module).values() if getattr(item, "__module__", None) == name
            ]
            methods |= {
                item.__name__
                for item in defined
                if isinstance(item, type) and issubclass(item, FedAvg)
            }
    registered = {strategy.__name__ for strategy in REGISTRY.values()}
    assert methods - NOT_METHODS == registered


def test_all_resolves() -> None:
    for name in [name for name, path in SOURCES.items() if "__all__ =" in path.read_text()]:
        module = importlib.import_module(name)
        assert len(set(module.__all__)) == len(module.__all__), name
        assert [item for item in module.__all__ if not hasattr(module, item)] == [], name


def test_every_registered_strategy_is_public() -> None:
    public = importlib.import_module("fedbn_flwr.strategies").__all__
    assert [
        strategy.__name__ for strategy in REGISTRY.values() if strategy.__name__ not in public
    ] == []
