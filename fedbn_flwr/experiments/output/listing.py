"""What `fedbn-flwr list` shows: every name that an option takes, with a line about each."""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import getdoc
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedbn_flwr.data import AUGMENTATIONS, DATASETS, PARTITIONS
from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.models import MODELS
from fedbn_flwr.norm import NORMS
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, FedAvg

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
    """Print a table of each kind."""
    tables = listing()
    common = list(own_options(FedAvg))
    strategies = [
        {**row, "options": [key for key in row["options"] if key not in common]} for row in tables.pop("strategies")
    ]
    _show("strategies", strategies, ("name", "about", "paper", "leaves the client", "options"))
    console.print(f"  All strategies also have the options {', '.join(common)}.\n")
    for kind, rows in tables.items():
        _show(kind, [{**row, "name": row.get("form", row["name"])} for row in rows], ("name", "about"))


def _strategy(name: str, strategy: type[BaseStrategy]) -> Row:
    # a user's method is not that of the paper of its base
    own = vars(strategy)
    facts = {"paper": own.get("paper", ""), "leaves the client": own.get("leaves", "")}
    return {**_row(name, strategy), **facts, "options": list(own_options(strategy))}


def _row(name: str, thing: Callable[..., object]) -> Row:
    text = getdoc(thing.func if isinstance(thing, partial) else thing) or ""
    return {"name": name, "about": " ".join(text.partition("\n\n")[0].split())}


def _show(kind: str, rows: Iterable[Row], columns: tuple[str, ...]) -> None:
    table = Table(title=kind, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(", ".join(row[column]) if isinstance(row[column], list) else row[column] for column in columns))
    console.print(table)
