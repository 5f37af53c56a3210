"""Write tables of names into the pages of `reference/`, for readers on a forge: only a site that is
built has the rest.
"""

import re
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import FunctionType, ModuleType

PAGES = sorted(
    page for page in (Path(__file__).parent / "reference").glob("*.md") if page.stem != "index"
)
#: what the site puts the documentation of a package in the place of
DIRECTIVE = "\n::: "


def written(page: str) -> str:
    """Return a page's text with a table of the names of its package."""
    text, package = page.rstrip().split(DIRECTIVE)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    return "\n".join(prose).rstrip() + f"\n\n{table(package)}\n{DIRECTIVE}{package}\n"


def table(package: str) -> str:
    """Return a line for each public function and class of a package: what its documentation says
    first.
    """
    module = import_module(package)
    lines = ["| name | |", "|---|---|"]
    for name in public_names(module):
        said = first_sentence(getattr(module, name))
        if said:
            lines.append(f"| `{name}` | {said} |")
    return "\n".join(lines)


def public_names(module: ModuleType) -> list[str]:
    """Return what a package offers: `__all__`, or the functions and classes that are its own."""
    own = [
        name
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    return list(getattr(module, "__all__", sorted(own)))


def first_sentence(thing: object) -> str:
    """Return the first sentence of what documents a function or a class."""
    if not isinstance(thing, type | FunctionType):
        return ""
    said = " ".join((getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) |:$", said)[0].replace("|", r"\|")


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text()))
