"""The look of the report's pictures: legible in print and on a phone, without relying on colours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from fedbn_flwr.experiments.output.plots import COLOURS
from fedbn_flwr.plugins import extra

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
}
#: the same results make the same files
UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


@dataclass(frozen=True)
class Picture:
    """A picture of the report: what draws it onto axes."""

    name: str
    caption: str
    paint: Callable[[Any], None]
    height: float = SIZE[1]
    #: the setting that it is of; empty if it is of all
    setting: str = ""

    def file(self, kind: str) -> bytes:
        """Return the picture as a file of a kind that matplotlib knows, such as `png` or `pdf`."""
        with styled() as figure_class:
            figure, file = figure_class(figsize=(SIZE[0], self.height), layout="constrained"), BytesIO()
            self.draw(figure)
            figure.savefig(file, format=kind, dpi=DPI, metadata=UNDATED.get(kind))
        return file.getvalue()

    def draw(self, figure: Any) -> None:
        """Draw onto a figure, or a part of one."""
        axes = figure.add_subplot()
        self.paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            columns = 1 if max(map(len, labels)) > 24 else 2 if max(map(len, labels)) > 14 else 3
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


@contextmanager
def styled() -> Iterator[Any]:
    """Set the fonts inside the block, and yield the class of figures, which need no display."""
    with extra("cli"):  # imported here because it takes a second
        import matplotlib

    from matplotlib.figure import Figure

    with matplotlib.rc_context(FONT):
        yield Figure


def bar_style(index: int) -> dict[str, Any]:
    """Return how the bars of the method with this index are drawn."""
    colour, hatch = COLOURS[index % 8], HATCHES[(index + index // 8) % 8]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def whole_numbers(axes: Any) -> None:
    """Mark the x axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def logarithmic(axes: Any) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5 times each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
