"""Output to the terminal: a progress bar during runs, a table at the end."""

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Literal, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedbn_flwr.data import Data
from fedbn_flwr.experiments.choice import ABOUT_EDGE, chosen_of
from fedbn_flwr.experiments.comparison import Line, lines, metric_of, typical
from fedbn_flwr.experiments.output.recorder import Progress as Callback
from fedbn_flwr.experiments.output.recorder import Summary, outcome_of
from fedbn_flwr.experiments.resources import about_absent
from fedbn_flwr.traffic.counting_grid import MEGABYTE

console = Console()
#: numbers of a summary that are shares: files have them as shares, people read percent
SHARES = ("accuracy", "mean-iou", "accuracy-personal", "accuracy-mean-bn")


def percent(share: float, digits: int = 1) -> str:
    """Return a share in percent, as all tables and pictures show it; what is 0 has no sign."""
    return f"{100 * share:z.{digits}f}"


class Bars:
    """A progress bar over all runs, with the present run and the last score of its model.

    It stands in a terminal or under a notebook's cell, which it leaves at the end. Elsewhere, `lines` lets each run
    print a line in every tenth of its rounds. Over both stands a line about the data.
    """

    def __init__(self, runs: int, data: Data, progress: bool | Literal["lines"] = "lines") -> None:
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._cell = _Cell() if progress and in_notebook() else None
        self._has_bar = bool(progress) and self._cell is None and console.is_terminal
        self._has_lines = progress == "lines" and self._cell is None and not console.is_terminal
        self._runs, self._data = runs, data
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
            self._cell.show("")

    def announce(self, label: str) -> Callback:
        """Start the next run, and return the function to call after each of its rounds."""
        before, self._done = self._done, self._done + 1

        def advance(server_round: int, rounds: int, score: float | None) -> None:
            text = f"{label}: {percent(score)} %" if score is not None else label
            text = f"{label}: {score:.4g}" if score is not None and self._data.task == "regression" else text
            # a tenth of the rounds, or one more, was complete in this round
            is_tenth = server_round * 10 // rounds > (server_round - 1) * 10 // rounds
            if self._has_lines and is_tenth:
                console.print(f"round {server_round}/{rounds}, {text}", markup=False, highlight=False, soft_wrap=True)
            total = rounds * max(self._runs, self._done)
            done = before * rounds + server_round
            if self._cell:
                self._cell.show(f'<progress value="{done}" max="{total}"></progress> {escape(text)}')
            self._progress.update(self._task, total=total, completed=done, description=text)

        return advance


class _Cell:
    """A place under a notebook's cell that is written again and again."""

    def __init__(self) -> None:
        self._handle = import_module("IPython.display").display({"text/html": ""}, raw=True, display_id=True)

    def show(self, html: str) -> None:
        self._handle.update({"text/html": html}, raw=True)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def show_run(summary: Summary, folder: Path) -> None:
    """Print the result of one run."""
    table = Table(title=f"{summary['method']} on {summary['dataset']}, {summary['model']}, {summary['partition']}")
    table.add_column("result")
    table.add_column("value", justify="right")
    for key, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            share = key in SHARES and isinstance(value, float)
            number = percent(value, 2) if share else f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
            table.add_row(f"{key}, %" if share else key, number)
    console.print(table)
    _show_absent(summary)
    console.print(f"Results: {folder.resolve()}")


def show_comparison(summaries: Sequence[Summary], folder: Path) -> None:
    """Print a row for each method, accuracies by domain where there are domains, and why a method failed."""
    finished = [summary for summary in summaries if "error" not in summary]
    failed = {summary["method"]: summary for summary in summaries if "error" in summary}
    if finished:
        methods = dict.fromkeys((run["method"] for run in summaries), "")
        _show_accuracies(finished, methods | {method: outcome_of(run) for method, run in failed.items()})
        _show_domains([run for run in finished if run["method"] not in failed])
    for method, summary in failed.items():
        console.print(f"{method}, seed {summary['seed']}: {summary['error']}", style="yellow", soft_wrap=True)
    console.print(f"Results: {folder.resolve()} (compare.json, compare.png, one folder a run)")


def _show_accuracies(summaries: Sequence[Summary], failures: Mapping[str, str]) -> None:
    """Print a row for each method of `failures`, which maps it to words in place of its numbers, if a run failed."""
    compared = lines(summaries)
    several, baseline = len(summaries) > len(compared), compared[0].method
    first, varies = typical(summaries), len({run["lr"] for run in summaries}) > 1
    is_chosen = any("chosen" in run for run in summaries)
    table = new_table("{dataset}, {model}, {partition}, {rounds} rounds".format_map(first), "method")
    columns: dict[str, Callable[[Line], str]] = {
        f"{metric_of(first)}, %": lambda line: (
            percent(line.mean) + (f" ± {percent(line.deviation)}" if several else "")
        ),
        "personal": lambda line: _mean(summaries, line.method, "accuracy-personal"),
        "mean BN": lambda line: _mean(summaries, line.method, "accuracy-mean-bn"),
        f"vs {baseline}": lambda line: (
            ""
            if line is compared[0]
            else f"{100 * line.difference:+z.1f}" + (f" ± {percent(line.half_width)}" if several else "")
        ),
        "chosen": lambda line: chosen_of(line.summary),
        "lr": lambda line: f"{line.summary['lr']:g}" if varies and not is_chosen else "",
        "MB sent": lambda line: f"{line.summary['payload-bytes'] / MEGABYTE:.1f}",
        "exchanges": lambda line: f"{line.summary['exchanges']:,}",
        "s": lambda line: f"{line.summary['seconds']:.1f}",
    }
    cells = {heading: [cell(line) for line in compared] for heading, cell in columns.items()}
    shown = {heading: column for heading, column in cells.items() if any(column)}
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=heading != f"vs {baseline}")
    numbers = {line.method: [column[index] for column in shown.values()] for index, line in enumerate(compared)}
    for method, failure in failures.items():
        table.add_row(*map(Text, (method, *([failure] if failure else numbers[method]))))
    _print(table)
    if len(compared) > 1 and len(summaries) < 2 * len(compared):
        _footer("One seed: a difference may be chance. `--seeds 3` gives intervals.")
    if any(run.get("chosen-at-edge") for run in summaries):
        _footer(ABOUT_EDGE)
    _show_absent(first)


def _show_absent(summary: Summary) -> None:
    if classes := summary.get("absent-classes"):
        _footer(f"Caution: {about_absent(classes, summary['partition'], summary['clients'])}.")


def _footer(text: str) -> None:
    console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


def _show_domains(summaries: Sequence[Summary]) -> None:
    by_method: dict[str, list[dict[str, float]]] = {}
    for summary in summaries:
        if "domain-accuracy" in summary:
            by_method.setdefault(summary["method"], []).append(summary["domain-accuracy"])
    if not by_method:
        return
    domains = list(next(iter(by_method.values()))[0])
    title = "accuracy by domain, % (personal models: on their nodes' domain)"
    table = new_table(title, "method", numbers=(*domains, "mean"))
    for method, runs in by_method.items():
        means = [fmean(run[domain] for run in runs) for domain in domains]
        table.add_row(*map(Text, (method, *(percent(value) for value in (*means, fmean(means))))))
    _print(table)


def new_table(title: str, *texts: str, numbers: Sequence[str] = ()) -> Table:
    """Return a table with columns of texts, which fold, and then of numbers."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True)
    for heading in (*texts, *numbers):
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table


def _print(table: Table) -> None:
    """Print a table of texts; one wider than the terminal breaks headings, and before options and deviations."""
    if console.measure(table, options=console.options.update_width(1000)).maximum > console.width:
        for column in table.columns:
            column.header = str(column.header).replace(" ", "\n")
            for cell in column.cells:
                if isinstance(cell, Text):
                    cell.plain = str(cell).replace(":", "\n:").replace(" ±", "\n±")
    console.print(table)


def _mean(summaries: Sequence[Summary], method: str, key: str) -> str:
    values = [run[key] for run in summaries if run["method"] == method and key in run]
    return percent(fmean(values)) if values else ""
