"""Pictures of runs: curves over rounds, exchanges and bytes, and bars by domain.

All have one look, which is legible in print and on a phone, also without colours.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from logging import WARNING
from pathlib import Path
from textwrap import fill
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
from flwr.common import log

from fedbn_flwr.experiments.recipes.paper import Paper
from fedbn_flwr.experiments.results.rows import (
    Frame,
    column,
    finished,
    pd,
    rounds_of,
    score_of,
    title_of,
    typical,
)
from fedbn_flwr.experiments.results.values import (
    AVERAGE,
    capitalized,
    domains_of,
    heading_of,
    numbers_of,
    scale_of,
    values_of,
)
from fedbn_flwr.plugins import extra
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.transports.counting_grid import MEGABYTE

#: settings of which a report draws pictures, and up to how many it draws more than the score over
#: rounds
SETTINGS = 12
FEW = 4
LOSSES = {
    "train-loss": "training loss",
    "loss-deviation": "standard deviation of the clients' losses",
}
#: by what curves go over, the label of the axis
AXES = {"rounds": "round", "exchanges": "exchanges", "bytes": "MB sent, as papers count"}
#: parts of a run over which a loss is averaged where many lines stand in one picture
SMOOTHED = 20
#: the range of values from which on a scale is logarithmic
DECADE = 10
#: methods that look the same in all pictures; one with `bn-ws` has the colour of the same without
#: it
FIXED = (
    "fedavg",
    "fedavg+gn",
    "fixbn",
    "centralized",
    "fedtan",
    "fedtan:carry=true",
    "fedwon",
    "fedbn",
    "fedavg+bn-ws",
    "fedavg+gn-ws",
    "fixbn+bn-ws",
    "centralized+bn-ws",
    "fedtan+bn-ws",
    "fedtan+bn-ws:carry=true",
)
#: eight colours that differ for all kinds of colour vision (seven of Okabe and Ito), dark enough
#: for lines on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#661100")
STROKES = ("solid", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX<"
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")
#: inches without the legend: on a phone's 390 points, 11-point text stays 11 pixels high, and 7
#: with two panels
SIZE = (5.2, 3.6)
WIDE = (8.0, 3.6)
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
        """A figure of matplotlib, whose lines, labels and sizes can be changed.

        A notebook shows it.
        """

        def save(self, path: str | Path | IO[bytes], form: str | None = None) -> None:
            """Write a file in the form that its ending or `form` names, such as png, pdf or svg."""
            form = form or Path(str(path)).suffix.removeprefix(".")
            with styled():
                self.savefig(path, format=form, metadata=UNDATED.get(form))

        def add_legend(self, axes: Any) -> None:
            """Put the legend of axes below them, in columns that fit, and make room for it."""
            handles, labels = axes.get_legend_handles_labels()
            if labels:
                columns = max(1, int(self.get_figwidth() / (0.75 + 0.085 * max(map(len, labels)))))
                self.set_figheight(self.get_figheight() + 0.21 * -(-len(labels) // columns))
                self.legend(
                    handles,
                    letters(labels),
                    loc="outside lower center",
                    ncols=columns,
                    frameon=False,
                )

        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.save(file, "png")
            return file.getvalue()

    return Plot


@contextmanager
def figure(
    path: Path | IO[bytes], panels: int = 1, size: Sequence[float] = WIDE, form: str = ""
) -> Iterator[Any]:
    """Open a figure with panels side by side, and write it as a file at the end.

    Yield figure and panels.
    """
    with styled() as figure_class:
        picture = figure_class(figsize=size, dpi=DPI, layout="constrained")
        yield picture, picture.subplots(1, panels)
        picture.save(path, form)


def letters(texts: Iterable[str]) -> list[str]:
    """Return texts for a picture, which matplotlib takes for mathematics between two dollar
    signs.
    """
    return [text.replace("$", r"\$") for text in texts]


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
        """Return the picture, with the legend below, as a file of a kind that matplotlib knows,
        such as `png`.
        """
        file = BytesIO()
        with figure(file, 1, (SIZE[0], self.height), kind) as (picture, axes):
            self.paint(axes)
            picture.add_legend(axes)
        return file.getvalue()


class Mark(NamedTuple):
    """What changes after a round."""

    text: str
    after: int


#: by a method's label
Marks: TypeAlias = Mapping[str, Sequence[Mark]]
Looks: TypeAlias = Mapping[str, int]


def looks_of(runs: Frame) -> dict[str, int]:
    """Return the number of each label's look: a fixed one, or one that no fixed method has, of a
    free colour first.
    """
    methods = dict(zip(runs["label"], runs["method"], strict=True))
    first = {method: label for label, method in reversed(methods.items())}
    looks = {first[method]: look for look, method in enumerate(FIXED) if method in first}
    taken = {look % 8 for look in looks.values()}
    free = iter(sorted(range(16, 24 + len(methods)), key=lambda look: look % 8 in taken))
    return {label: looks[label] if label in looks else next(free) for label in methods}


def line_style(look: int, place: int = 0, points: int = 0) -> dict[str, Any]:
    """Return matplotlib's style of a line with `points` points.

    `look` chooses colour, stroke and marker. `place`, the line's position among the lines of a
    picture, chooses its width and which points have markers, so that coinciding lines stay visible.
    """
    step = max(1, points // 8)
    return {
        "color": COLOURS[look % len(COLOURS)],
        "linestyle": STROKES[look % len(STROKES)],
        "marker": MARKERS[(look + look // 8) % 8],
        "markevery": (place % step, step),
        "linewidth": max(2.6 - 0.2 * place, 1.2),
        "markersize": 6.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def bar_style(look: int) -> dict[str, Any]:
    """Return how bars with this look are drawn."""
    colour = COLOURS[look % 8]
    hatch = HATCHES[(look + look // 8) % 8]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def draw_lines(axes: Any, points: Frame, looks: Looks) -> None:
    """Draw the mean of each label's runs at the points that they share, and their range: `label`,
    `run`, `x`, `y`.
    """
    for place, label in enumerate(label for label in looks if label in set(points["label"])):
        own = points[points["label"] == label]
        lines = own.groupby(["x", "run"])["y"].last().unstack().dropna()
        style = line_style(looks[label], place, len(lines))
        axes.plot(lines.index, lines.mean(axis=1), label=label, **style)
        if lines.shape[1] > 1:
            ends = lines.min(axis=1), lines.max(axis=1)
            axes.fill_between(lines.index, *ends, color=style["color"], alpha=0.15, linewidth=0)


def points_of(rounds: Frame, key: str, x: Any = None) -> Frame:
    """Return a number of the rounds that have it, as people read it, over `x`, or over rounds."""
    y = scale_of(key) * pd.to_numeric(column(rounds, key), errors="coerce")
    return rounds[["label", "run"]].assign(x=rounds["round"] if x is None else x, y=y).dropna()


def smoothed(points: Frame, window: int) -> Frame:
    """Return, in the place of each run's values, their means over the last rounds: losses of single
    mini-batches hide the lines.
    """
    means = points.groupby(["label", "run"], sort=False)["y"].transform(
        lambda values: values.rolling(window, min_periods=1).mean()
    )
    return points.assign(y=means)


def plot_curves(runs: Frame) -> Any:
    """Return a figure of the score and the training loss over the rounds: each method's mean over
    seeds, and the range.

    A UsageError says so if no run has finished.
    """
    ended = finished(runs)
    score = score_of(runs)
    if not len(ended):
        raise UsageError("there is no picture: no run has finished")
    ended = ended.assign(label=ended["method"])
    rounds = rounds_of(ended)
    looks = looks_of(ended)
    with styled() as figure_class:
        picture = figure_class(figsize=WIDE, dpi=DPI, layout="constrained")
        panels = picture.subplots(1, 2)
        window = max(1, int(rounds["round"].max()) // SMOOTHED)
        losses = smoothed(points_of(rounds, "train-loss"), window)
        draw_lines(panels[0], points_of(rounds, score), looks)
        draw_lines(panels[1], losses, looks)
        loss = "training loss"
        if window > 1:
            loss = f"training loss, mean of {window} rounds"
        labels = f"test {heading_of(score)}", loss
        for panel, label in zip(panels, labels, strict=True):
            panel.set(xlabel="round", ylabel=label, xlim=(0, None))
            panel.grid(alpha=0.3)
        panels[1].set_yscale("log", subs=(2, 5))
        panels[1].yaxis.set_major_formatter("{x:g}")
        panels[1].yaxis.set_minor_formatter("{x:g}")
        picture.suptitle(*letters([title_of(typical(ended))]))
        picture.add_legend(panels[0])
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


def curves(runs: Frame) -> Iterator[Picture]:
    """Draw the curves of the first settings of runs."""
    rounds = rounds_of(runs)
    settings = rounds["setting"].unique()
    for setting in settings[:SETTINGS]:
        own = runs[runs["setting"] == setting]
        its_rounds = rounds[rounds["setting"] == setting]
        yield from filter(None, _curves(own, its_rounds, few=len(settings) <= FEW))


def _curves(runs: Frame, rounds: Frame, few: bool) -> Iterator[Picture | None]:
    setting = runs["setting"].iloc[0]
    score = score_of(runs)
    first = runs.drop_duplicates("label")
    marks = {run["label"]: marks_of(rounds[rounds["run"] == at]) for at, run in first.iterrows()}
    draw = partial(_picture, setting=setting, marks=marks, looks=looks_of(runs))
    exchanges = column(rounds, "exchanges").fillna(0)
    sums = pd.DataFrame(
        {"exchanges": exchanges, "bytes": column(rounds, "paper-bytes").fillna(0) / MEGABYTE}
    )
    positions = {"rounds": rounds["round"], **sums.groupby(rounds["run"]).cumsum()}
    for kind in AXES if few else ["rounds"]:
        if kind != "exchanges" or exchanges.max() > 1:
            points = points_of(rounds, score, positions[kind])
            caption = f"{score.replace('-', ' ')} against {kind}"
            yield draw(points, f"{score}-{kind}", caption, AXES[kind], heading_of(score))
    if few:
        for key, text in LOSSES.items():
            yield draw(points_of(rounds, key), key, text, "round", text, log=True)


def _picture(
    points: Frame,
    name: str,
    caption: str,
    x: str,
    y: str,
    setting: str,
    marks: Marks,
    looks: Looks,
    log: bool = False,
) -> Picture | None:
    """Draw lines, if one has two points: the mean of a method's runs, and their range."""
    runs = points.groupby("run")
    if not len(points) or runs.size().max() < 2:
        return None
    points = points[runs["x"].transform("max") > 0]

    def paint(axes: Any) -> None:
        draw_lines(axes, points, looks)
        axes.set(xlabel=x, ylabel=fill(y, 32))
        if x == "round":
            axes.xaxis.get_major_locator().set_params(integer=True)
            draw_marks(axes, {label: marks[label] for label in points["label"].unique()}, looks)
        if log and points["y"].max() > DECADE * points["y"].min() > 0:
            axes.set_yscale("log")
        ends = points.groupby("run")["x"].max()
        if x != "round" and ends.max() > 5 * ends.min():
            axes.set_xscale("log")
        axes.grid(alpha=0.3)

    caption = f"{caption[0].upper()}{caption[1:]}"
    if setting:
        caption += f" in {setting}"
    return Picture(file_name(f"{name}-{setting}"), caption, paint, setting=setting)


def marks_of(rounds: Frame) -> list[Mark]:
    """Return what changes in a run, as its rows say: the freeze, steps of the rate, the stage."""
    frozen = rounds["round"][column(rounds, "freeze").notna()]
    changed = column(rounds, "lr").diff().fillna(0) != 0
    # a rate that moves in every round, as under `cosine`, has no steps
    moving = changed.shift(1, fill_value=False) | changed.shift(-1, fill_value=False)
    stepped = rounds["round"][changed & ~moving]
    second = rounds["round"][column(rounds, "fedbs-stage") == 2]
    changes = [("freeze", frozen[:1]), ("learning rate", stepped), ("stage 2", second[:1])]
    return [
        Mark(text, int(number) - 1)
        for text, numbers in changes
        for number in numbers
        if number > 1  # what holds from the first round on is no change
    ]


def draw_marks(axes: Any, marks: Marks, looks: Looks) -> None:
    """Draw a line at every mark, in the colour of the method if only one has it, else in grey, and
    name it above.
    """
    first, last = axes.get_xlim()
    for after in sorted(
        {mark.after for each in marks.values() for mark in each if first < mark.after + 0.5 < last}
    ):
        here = [
            (label, mark.text)
            for label, each in marks.items()
            for mark in each
            if mark.after == after
        ]
        owners = dict(here)
        texts = dict.fromkeys(text for _, text in here)
        if len(owners) > 1:
            colour = "#555555"
        else:
            colour = COLOURS[looks[here[0][0]] % 8]
        axes.axvline(after + 0.5, color=colour, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        place = {"xycoords": ("data", "axes fraction"), "rotation": 25, "rotation_mode": "anchor"}
        axes.annotate(", ".join(texts), (after + 0.5, 1.02), color=colour, fontsize=8, **place)


def bars(runs: Frame, paper: Paper) -> Iterator[Picture]:
    """Draw what the final numbers of runs allow."""
    values = values_of(numbers_of(runs, paper.quantities, paper.rounds))
    settings = dict(zip(runs["setting"], runs["labels"], strict=True))
    at = values.index.get_level_values("setting")
    for setting in [*settings][:SETTINGS]:
        yield from _domains(runs, setting, values[at == setting].droplevel("setting"))


def _domains(runs: Frame, setting: str, values: Frame) -> Iterator[Picture]:
    """Draw the score by domain, where all methods have it."""
    looks = looks_of(runs)
    heading = heading_of(score_of(runs))
    methods = [label for name, label in values.index if name == AVERAGE]
    names = domains_of(runs)
    order = []
    for name in [*names, AVERAGE]:
        if all((name, label) in values.index for label in methods):
            order.append(name)
    if not methods or not names:
        return
    shown = values.loc[order]

    def paint(axes: Any) -> None:
        width = 0.84 / len(methods)
        for index, label in enumerate(methods):
            own = shown.xs(label, level="label").loc[order]
            at = np.arange(len(order)) + (index - (len(methods) - 1) / 2) * width
            whiskers = {
                "yerr": own["deviation"] if own["deviation"].any() else None,
                "error_kw": {"elinewidth": 1},
            }
            axes.bar(at, own["mean"], width, label=label, **whiskers, **bar_style(looks[label]))
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.set_xticks(range(len(order)), letters(order), rotation=20 if len(order) > 4 else 0)
        axes.set_ylabel(heading)

    caption = f"{capitalized(heading.removesuffix(', %'))} by domain"
    if setting:
        caption += f" in {setting}"
    if (shown["number"] > 1).any():
        caption += "; whiskers: standard deviation of the runs"
    yield Picture(file_name(f"domains-{setting}"), caption, paint, setting=setting)
