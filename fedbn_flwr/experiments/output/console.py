"""The terminal: what is printed goes through `console`.

A progress bar shows how far runs have come.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedbn_flwr.client.learning_task import task_of
from fedbn_flwr.data import Data

#: of names and paths, which may hold what would be markup or an emoji
console = Console(markup=False, emoji=False, highlight=False)


def percent(share: float) -> str:
    """Return a share in percent, as all tables show it; what is 0 has no sign."""
    return f"{100 * share:z.1f}"


class Bars:
    """A progress bar over all runs, with the present run and the last score of its model.

    In a terminal or under a notebook's cell, the bar disappears at the end. Elsewhere, each run
    prints a line in every tenth of its rounds. A line about the data comes first.
    """

    def __init__(self, runs: int, data: Data, progress: bool = True) -> None:
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        #: the place under a notebook's cell, which is written again and again
        self._cell: Any = None
        if progress and in_notebook():
            display = import_module("IPython.display").display
            self._cell = display({"text/html": ""}, raw=True, display_id=True)
        self._has_bar = progress and self._cell is None and console.is_terminal
        self._has_lines = progress and self._cell is None and not console.is_terminal
        self._runs = runs
        self._data = data
        self._task = self._progress.add_task("", total=None)
        self._done = 0

    def __enter__(self) -> Self:
        if self._has_bar or self._has_lines:
            print(self._data)
        if self._has_bar:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_bar:
            self._progress.stop()
        if self._cell:
            self._cell.update({"text/html": ""}, raw=True)

    def announce(self, label: str) -> Callable[[int, int, float | None], None]:
        """Start the next run, and return the function to call after each of its rounds."""
        before = self._done
        self._done += 1

        def advance(server_round: int, rounds: int, score: float | None) -> None:
            text = label
            if score is not None:
                text = f"{label}: {percent(score)} %"
            if score is not None and not task_of(self._data.task).has_classes:
                text = f"{label}: {score:.4g}"
            # a tenth of the rounds, or one more, was complete in this round
            is_tenth = server_round * 10 // rounds > (server_round - 1) * 10 // rounds
            if self._has_lines and is_tenth:
                say([f"round {server_round}/{rounds}, {text}"])
            total = rounds * max(self._runs, self._done)
            done = before * rounds + server_round
            if self._cell:
                bar = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
                self._cell.update({"text/html": bar}, raw=True)
            self._progress.update(self._task, total=total, completed=done, description=text)

        return advance


def say(lines: Iterable[str], **style: Any) -> None:
    """Print lines as they are, however wide the terminal is."""
    for line in lines:
        console.print(line, soft_wrap=True, **style)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = None
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
    return hasattr(shell, "kernel")


def new_table(title: str, *texts: str, numbers: Sequence[str] = ()) -> Table:
    """Return a table with columns of texts, which fold, and then of numbers."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    for heading in (*texts, *numbers):
        table.add_column(
            heading, justify="right" if heading in numbers else "left", overflow="fold"
        )
    return table
