"""What a person sees in the terminal: a bar while it runs, a table at the end."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .comparison import Line, lines
from .journal import Progress as Callback
from .journal import Summary

console = Console()


class Bars:
    """One bar over all runs; the text tells the run, its round and its last accuracy."""

    def __init__(self, runs: int) -> None:
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._runs = runs
        self._task = self._progress.add_task("", total=None)
        self._done = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def announce(self, label: str) -> Callback:
        """Start the bar's next run; the returned function takes its rounds."""
        before, self._done = self._done, self._done + 1

        def advance(server_round: int, rounds: int, accuracy: float | None) -> None:
            text = f"{label}: accuracy {accuracy:.3f}" if accuracy is not None else label
            total = rounds * max(self._runs, self._done)
            self._progress.update(self._task, total=total, completed=before * rounds + server_round, description=text)

        return advance


def show_run(summary: Summary, folder: Path) -> None:
    """The result of one run."""
    table = Table(title=f"{summary['method']} on {summary['dataset']}, {summary['model']}, {summary['partition']}")
    table.add_column("result")
    table.add_column("value", justify="right")
    for key, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(key, f"{value:.4f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    console.print(f"Results: {folder.resolve()}")


def show_comparison(summaries: Sequence[Summary], folder: Path) -> None:
    """One row a method."""
    compared = lines(summaries)
    several = len(summaries) > len(compared)
    first = summaries[0]
    title = f"{first['dataset']}, {first['model']}, {first['partition']}, {first['rounds']} rounds"
    table = Table(title=title)
    headings = [
        "method",
        "accuracy",
        "personal",
        "mean BN",
        f"vs {compared[0].method}",
        "lr",
        "MB sent",
        "exchanges",
        "s",
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for line in compared:
        table.add_row(*_cells(line, several, line is compared[0]))
    console.print(table)
    console.print(f"Results: {folder.resolve()} (compare.json, compare.png, one folder a run)")


def _cells(line: Line, several: bool, first: bool) -> list[str]:
    run = line.summary
    spread = f" ± {line.deviation:.3f}" if several else ""
    interval = f" ± {line.half_width:.3f}" if several else ""
    return [
        line.method,
        f"{line.mean:.3f}{spread}",
        _optional(run, "accuracy-personal"),
        _optional(run, "accuracy-mean-bn"),
        "" if first else f"{line.difference:+.3f}{interval}",
        f"{run['lr']:g}",
        f"{run['payload-bytes'] / 2**20:.1f}",
        f"{run['exchanges']:,}",
        f"{run['seconds']:.1f}",
    ]


def _optional(run: Summary, key: str) -> str:
    return f"{run[key]:.3f}" if key in run else ""
