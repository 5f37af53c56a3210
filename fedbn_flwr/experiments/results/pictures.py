"""The one look of all pictures: legible in print and on a phone, also without colours. And curves over the rounds."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from logging import WARNING
from pathlib import Path
from typing import IO, Any

import numpy as np
from flwr.common import log

from fedbn_flwr.experiments.results.values import heading_of, scale_of
from fedbn_flwr.plugins import extra

Rows = Sequence[Mapping[str, Any]]
#: x and y of every point of a line
Line = tuple[Sequence[float], Sequence[float]]

LEGEND_COLUMNS = 6
#: eight colours that differ for all kinds of colour vision (Okabe and Ito), dark enough for lines on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8A8A00")
STROKES = ("solid", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX*"
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")
#: inches: on a phone's 390 points, 11-point text stays 11 pixels high
SIZE = (5.2, 3.9)
DPI = 200
FONT: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # letters stay letters, which can be searched for
    "pdf.fonttype": 42,
    "svg.hashsalt": "fedbn-flwr",
}
#: the same results make the same files
UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


@contextmanager
def styled() -> Iterator[Any]:
    """Set the fonts inside the block, and yield the class of figures, which need no display."""
    with extra("cli"):  # imported here because it takes a second
        import matplotlib

    with matplotlib.rc_context(FONT):
        yield _figure_class()


@cache
def _figure_class() -> Any:
    from matplotlib.figure import Figure  # not pyplot, whose backend is a notebook's own

    class Plot(Figure):
        """A figure of matplotlib, whose lines, labels and sizes can be changed. A notebook shows it."""

        def save(self, path: str | Path | IO[bytes], form: str | None = None) -> None:
            """Write a file in the form that its ending or `form` names, such as png, pdf or svg."""
            form = form or Path(str(path)).suffix.removeprefix(".")
            with styled():
                self.savefig(path, format=form, metadata=UNDATED.get(form))

        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.save(file, "png")
            return file.getvalue()

    return Plot


@contextmanager
def figure(path: Path, panels: int = 1, size: tuple[float, float] = (11, 4.3)) -> Iterator[tuple[Any, Any]]:
    """Open a figure with panels side by side, and write it as a file at the end; yield figure and panels."""
    with styled() as figure_class:
        picture = figure_class(figsize=size, dpi=130, layout="constrained")
        yield picture, picture.subplots(1, panels)
        picture.save(path)


def file_name(text: str) -> str:
    """Return a text as the name of a file, without its ending."""
    return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-")


@dataclass(frozen=True)
class Picture:
    """A picture of a report: what draws it onto axes."""

    name: str
    caption: str
    paint: Callable[[Any], None]
    height: float = SIZE[1]
    #: the setting that it is of; empty if it is of all
    setting: str = ""

    def file(self, kind: str) -> bytes:
        """Return the picture, with the legend below, as a file of a kind that matplotlib knows, such as `png`."""
        file = BytesIO()
        with styled() as figure_class:
            figure = figure_class(figsize=(SIZE[0], self.height), dpi=DPI, layout="constrained")
            axes = figure.add_subplot()
            self.paint(axes)
            handles, labels = axes.get_legend_handles_labels()
            if labels:
                columns = 1 if max(map(len, labels)) > 24 else 2 if max(map(len, labels)) > 14 else 3
                figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
            figure.save(file, kind)
        return file.getvalue()


def line_style(index: int, count: int, points: int = 0) -> dict[str, Any]:
    """Return how the line of the method with this index is drawn; lines that coincide stay visible by their widths.

    Neighbouring lines have their markers at other points.
    """
    step = max(1, points // 8)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STROKES[index % len(STROKES)],
        "marker": MARKERS[(index + index // 8) % 8],
        "markevery": (index % step, step),
        "linewidth": 2.6 - 1.4 * index / max(count - 1, 1),
        "markersize": 6.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def bar_style(index: int) -> dict[str, Any]:
    """Return how the bars of the method with this index are drawn."""
    colour, hatch = COLOURS[index % 8], HATCHES[(index + index // 8) % 8]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def draw_runs(axes: Any, runs: Sequence[Line], **style: Any) -> None:
    """Draw the mean of runs at the points that they have in common, and their range."""
    common = sorted(set.intersection(*(set(x) for x, _ in runs))) if len(runs) > 1 else list(runs[0][0])
    values = np.array([[dict(zip(x, y, strict=True))[at] for at in common] for x, y in runs])
    (line,) = axes.plot(common, values.mean(0), **style)
    if len(runs) > 1:
        axes.fill_between(common, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)


def plot_curves(runs: Mapping[str, Sequence[Rows]], title: str = "", score: str = "accuracy") -> Any:
    """Return a figure of a score and the training loss over the rounds: each method's mean over seeds, and the range.

    `runs` has the rows of each run's rounds by method.
    """
    legend_rows = -(-len(runs) // LEGEND_COLUMNS)
    with styled() as figure_class:
        picture = figure_class(figsize=(11, 4.3 + 0.2 * legend_rows), dpi=130, layout="constrained")
        panels = picture.subplots(1, 2)
        labels = {score: f"test {heading_of(score)}", "train-loss": "training loss"}
        for panel, (key, label) in zip(panels, labels.items(), strict=True):
            for index, (method, seeds) in enumerate(runs.items()):
                lines = [points(rows, key) for rows in seeds]
                style = line_style(index, len(runs), min(len(x) for x, _ in lines))
                draw_runs(panel, lines, label=method, **style)
            panel.set(xlabel="round", ylabel=label, xlim=(0, None))
            panel.grid(alpha=0.3)
        panels[1].set_yscale("log")
        picture.suptitle(title)
        shown = panels[0].get_legend_handles_labels()
        picture.legend(*shown, loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
    return picture


def draw_or_warn(draw: Callable[[], Any], path: Path) -> None:
    """Write a figure; one that cannot be drawn is a warning, as results do not depend on it."""
    if not os.access(path.parent, os.W_OK):  # finished results, which are only read
        return
    try:
        draw().save(path)
    except Exception as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        log(WARNING, "%s could not be drawn: %s", path, error)


def points(rows: Rows, key: str, positions: Sequence[float] | None = None) -> Line:
    """Return a number of the rounds that have it, in percent if it is a share, over `positions`, or over rounds."""
    at = [row["round"] for row in rows] if positions is None else positions
    pairs = [
        (x, scale_of(key) * row[key]) for x, row in zip(at, rows, strict=True) if isinstance(row.get(key), int | float)
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]
