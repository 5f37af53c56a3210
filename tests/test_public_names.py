"""What is public is stated, documented, and in the API reference."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import griffe
import pytest

import fedbn_flwr
from tests.helpers.checkout import ROOT, environment

REFERENCE = ROOT / "docs" / "reference"
#: packages by the pages that show them
PAGES = {
    found[1]: page
    for page in sorted(REFERENCE.glob("*.md"))
    if (found := re.search(r"^::: (\S+)$", page.read_text(), re.M))
}
#: rooms that users import nothing from
INTERNAL = {"deployment", "experiments", "plugins", "server", "transports"}


@cache
def loaded() -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for root in ("strategies", "fedbn_flwr"):
        loader.load(root)
    loader.resolve_aliases()
    return loader.modules_collection


def public(package: str) -> list[griffe.Object | griffe.Alias]:
    """Return what a package names in `__all__`, or else defines itself."""
    module = loaded()[package]
    own = [
        name
        for name, item in module.members.items()
        if not (item.is_alias or item.is_module or name[0] == "_")
    ]
    names = own if module.exports is None else module.exports
    return [module[str(name)] for name in names]


def is_documented(item: griffe.Object | griffe.Alias) -> bool:
    """Return whether there is a docstring; for an alias of a type, or a constant, a comment `#:`
    above it.
    """
    target = item.final_target if isinstance(item, griffe.Alias) else item
    if target.has_docstring or not target.is_attribute:
        return target.has_docstring
    assert target.lineno is not None
    path = target.filepath
    assert not isinstance(path, list)
    # or it is a name on the wire, which docs/wire.md explains
    return (
        path.read_text().splitlines()[target.lineno - 2].startswith("#:")
        or f"`{name_of(target)}`" in WIRE
    )


def name_of(constant: griffe.Object) -> str:
    """Return the text that a constant stands for."""
    return str(getattr(constant, "value", "")).strip("'\"")


WIRE = (ROOT / "docs" / "wire.md").read_text()


@pytest.mark.parametrize("package", PAGES)
def test_every_public_name_and_method_is_documented(package: str) -> None:
    bare = [item.path for item in public(package) if not is_documented(item)]
    for item in public(package):
        target = item.final_target if isinstance(item, griffe.Alias) else item
        if target.is_class and target.path.startswith(("fedbn_flwr", "strategies")):
            bare += [
                member.path
                for name, member in target.members.items()
                if not name.startswith("_")
                and not member.is_alias
                and member.is_function
                and not member.has_docstring
            ]
    assert bare == []


def test_every_room_is_in_the_reference_or_internal() -> None:
    rooms = {path.parent.name for path in (ROOT / "fedbn_flwr").glob("*/__init__.py")}
    shown = {package.removeprefix("fedbn_flwr.") for package in PAGES}
    assert rooms | {"strategies"} == shown | INTERNAL


def test_the_index_names_every_package() -> None:
    index = (REFERENCE / "index.md").read_text()
    for package, page in PAGES.items():
        name = package if package.startswith("fedbn_flwr") else f"fedbn_flwr.{package}"
        assert f"| `{name}` | [" in index
        assert f"({page.name})" in index


def guides() -> Iterator[tuple[str, str]]:
    """Yield the Python of pages, examples and the notebook, with where it stands."""
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        text = page.read_text().replace("\\\n", " ")
        yield from (
            (page.name, block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        )
        yield from (
            (page.name, line.strip())
            for line in re.findall(r" -c \"(from \S+ import[^;\n]+);", text)
        )
    for path in sorted((ROOT / "apps" / "examples").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()
    for cell in json.loads((ROOT / "docs" / "first-steps.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield "first-steps.ipynb", "".join(cell["source"])


def test_guides_import_public_names_only() -> None:
    known = {f"fedbn_flwr.{name}" for name in fedbn_flwr.__all__}
    for package in PAGES:
        door = package if package.startswith("fedbn_flwr") else f"fedbn_flwr.{package}"
        known |= {f"{door}.{item.name}" for item in public(package)}
    asked = [
        (where, f"{node.module}.{alias.name}")
        for where, code in guides()
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("fedbn_flwr", "strategies")
        for alias in node.names
    ]
    assert {where for where, _ in asked} >= {
        "README.md",
        "deployment.md",
        "extending.md",
        "first-steps.ipynb",
    }
    assert [pair for pair in asked if pair[1] not in known] == []


def test_names_are_shown_and_imported_when_they_are_asked_for() -> None:
    shown = {*dir(fedbn_flwr)}
    assert {"adapt", "clientapp", "compare", "rows", "run", "strategies"} <= shown
    assert [name for name in shown if not hasattr(fedbn_flwr, name)] == []
    code = "import fedbn_flwr, sys; print(*sys.modules); fedbn_flwr.strategies.FixBN"
    command = [sys.executable, "-c", code]
    light = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "flwr", "numpy"} & {*light}
