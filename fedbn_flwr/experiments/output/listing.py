"""What `fedbn-flwr list` shows: every name that an option takes, with a line about each."""

from collections.abc import Callable
from functools import partial
from inspect import getdoc
from typing import Any

from fedbn_flwr.data import AUGMENTATIONS, DATASETS, PARTITIONS
from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.models import MODELS
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import did_you_mean
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.strategies import REGISTRY, BaseStrategy

#: the column of names is no wider; a longer name moves its own line
WIDEST = 24

#: facts about a name, by column
Row = dict[str, Any]


def listing() -> dict[str, list[Row]]:
    """Return what there is, by kind: the rows of each table, as `list --json` prints them."""
    return {
        "strategies": [_strategy(name, strategy) for name, strategy in REGISTRY.items()],
        "normalizers": [_row(name, swap) for name, swap in NORMS.items()],
        "models": [_row(name, entry.make) for name, entry in MODELS.items()],
        "datasets": [_row(name, read) for name, read in DATASETS.items()],
        "partitions": [{**_row(name, kind.share), "form": kind.form} for name, kind in PARTITIONS.items()],
        "augmentations": [_row(name, make) for name, make in AUGMENTATIONS.items()],
    }


def show_listing() -> None:
    """Print a line about each name, by kind; to a terminal, lines end where it does."""
    for kind, rows in listing().items():
        console.print(f"{kind}", style="bold")
        names = [str(row.get("form") or row["name"]) for row in rows]
        width = max(len(name) for name in names if len(name) <= WIDEST)
        for name, row in zip(names, rows, strict=True):
            look: dict[str, Any] = {"overflow": "ellipsis"} if console.is_terminal else {"soft_wrap": True}
            console.print(f"  {name:<{width}}  {row['about']}", markup=False, highlight=False, no_wrap=True, **look)
        console.print()
    console.print("`fedbn-flwr list NAME` says more about one of them.", markup=False, highlight=False)


def show_one(name: str) -> None:
    """Print all about one name; one that no kind has is a UsageError."""
    tables = listing()
    if name in tables:
        tables = {name: tables[name]}
    else:
        known = [row["name"] for rows in tables.values() for row in rows]
        if name not in known:
            raise UsageError(f"unknown name {name!r}; {did_you_mean(name, [*tables, *known])}")
        tables = {kind: [row for row in rows if row["name"] == name] for kind, rows in tables.items()}
    for row in (row for rows in tables.values() for row in rows):
        console.print(f"{row['name']}: {row['about']}", markup=False, highlight=False)
        for key in ("form", "paper", "leaves the client", "options"):
            if value := row.get(key):
                text = ", ".join(value) if isinstance(value, list) else value
                console.print(f"  {key}: {text}", markup=False, highlight=False)


def _strategy(name: str, strategy: type[BaseStrategy]) -> Row:
    # a user's method is not that of the paper of its base
    own = vars(strategy)
    facts = {"paper": own.get("paper", ""), "leaves the client": own.get("leaves", "")}
    return {**_row(name, strategy), **facts, "options": list(own_options(strategy))}


def _row(name: str, thing: Callable[..., object]) -> Row:
    text = getdoc(thing.func if isinstance(thing, partial) else thing) or ""
    return {"name": name, "about": " ".join(text.partition("\n\n")[0].split())}
