"""Curves over rounds, exchanges and bytes: accuracy, loss, and what single methods record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.output.plots import Line, Picture, draw_runs, file_name, line_style
from fedbn_flwr.experiments.recipes.recipe import heading_of
from fedbn_flwr.experiments.reports.sources import Run, Source, score_of
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.lr_schedule import round_of
from fedbn_flwr.traffic.counting_grid import MEGABYTE

#: settings of which a report draws curves, and up to how many it draws more than the score over rounds
SETTINGS, FEW = 12, 4
#: panels of training dynamics, as in FixBN's Figure 3 (a) to (c)
DYNAMICS = {
    "global-change": "(a) change of the global statistics",
    "batch-change": "(a) change of the mini-batch statistics",
    "local-distance": "(a) distance of local from global statistics",
    "window-variance": "(b) variance of the statistics in a window",
    "loss": "(c) training loss",
}
LOSSES = {"train-loss": "training loss", "loss-deviation": "standard deviation of the clients' losses"}
#: the range of values from which on a scale is logarithmic
DECADE = 10
STAGE = "stage 2"
Rows = Sequence[Mapping[str, Any]]
#: by what curves go over, the label of the axis and the positions of a run's rows
AXES: dict[str, tuple[str, Callable[[Rows], Sequence[float]]]] = {
    "rounds": ("round", lambda rows: [row["round"] for row in rows]),
    "exchanges": ("exchanges", lambda rows: list(accumulate(row.get("exchanges") or 0 for row in rows))),
    "bytes": (
        "MB sent, as papers count",
        lambda rows: list(accumulate((row.get("paper-bytes") or 0) / MEGABYTE for row in rows)),
    ),
}
#: label -> the runs' lines
Lines = Mapping[str, Sequence[Line]]


class Mark(NamedTuple):
    """What changes after a round."""

    text: str
    after: int


def curves(source: Source) -> Iterator[Picture]:
    """Draw the curves of the first settings."""
    settings = [item.name for item in source.recipe.settings]
    begun = [name for name in settings if any(run.rows for run in source.runs if run.setting == name)]
    for name in begun[:SETTINGS]:
        labels = dict.fromkeys(run.label for run in source.runs if run.setting == name)
        groups = {label: source.runs_of(name, label) for label in labels}
        yield from _setting(name, groups, few=len(begun) <= FEW)


def _setting(name: str, groups: Mapping[str, Sequence[Run]], few: bool) -> Iterator[Picture]:
    where = f" in {name}" if name else ""
    metric = score_of([run for runs in groups.values() for run in runs])
    score = metric.replace("-", " ")
    marks = {label: marks_of(runs[0]) for label, runs in groups.items()}
    for kind, (label, positions) in AXES.items() if few else [("rounds", AXES["rounds"])]:
        lines = _lines(groups, metric, positions, scale=100)
        rows = [row for runs in groups.values() for run in runs for row in run.rows]
        if kind != "exchanges" or any((row.get("exchanges") or 1) > 1 for row in rows):
            caption = f"{score} against {kind}{where}"
            yield from _picture(caption, f"{metric}-{kind}-{name}", name, lines, label, heading_of(metric), marks)
    for key in LOSSES if few else ():
        stages = key == "loss-deviation" and any(mark.text == STAGE for each in marks.values() for mark in each)
        caption = f"{LOSSES[key]}{f' and the round of {STAGE}' if stages else ''}{where}"
        lines = _lines(groups, key, AXES["rounds"][1])
        yield from _picture(caption, f"{key}-{name}", name, lines, "round", LOSSES[key], marks, log=True)
    for key, text in DYNAMICS.items() if few else ():
        lines = {label: [_dynamics(run, key) for run in runs] for label, runs in groups.items()}
        caption = f"{text}, mean of all layers{where}"
        yield from _picture(caption, f"{key}-{name}", name, lines, "round", text[4:], marks, log=True)


def _picture(
    caption: str,
    name: str,
    setting: str,
    lines: Lines,
    x: str,
    y: str,
    marks: Mapping[str, Sequence[Mark]],
    log: bool = False,
) -> Iterator[Picture]:
    """Draw lines, if one has two points: the mean of a method's runs, and their range."""
    drawn = {
        label: [(x, y) for x, y in runs if any(map(np.isfinite, y)) and max(x) > 0] for label, runs in lines.items()
    }
    drawn = {label: runs for label, runs in drawn.items() if runs}
    if all(len(x) < 2 for runs in drawn.values() for x, _ in runs):
        return
    points = [min((len(x) for x, _ in drawn.get(label, [])), default=0) for label in lines]
    styles = {label: line_style(index, len(lines), points[index]) for index, label in enumerate(lines)}
    values = [value for runs in drawn.values() for _, line in runs for value in line if np.isfinite(value)]

    def paint(axes: Any) -> None:
        for label, runs in drawn.items():
            draw_runs(axes, runs, label=label, **styles[label])
        axes.set(xlabel=x, ylabel=y)
        if x == "round":
            axes.xaxis.get_major_locator().set_params(integer=True)
            colours = {label: style["color"] for label, style in styles.items()}
            draw_marks(axes, {label: marks[label] for label in drawn}, colours)
        if log and max(values) > DECADE * min(values) > 0:
            axes.set_yscale("log")
        ends = [max(places) for runs in drawn.values() for places, _ in runs]
        if x != "round" and max(ends) > 5 * min(ends):
            _logarithmic(axes)
        axes.grid(alpha=0.3)

    yield Picture(file_name(name), caption[0].upper() + caption[1:], paint, setting=setting)


def _lines(
    groups: Mapping[str, Sequence[Run]], key: str, positions: Callable[[Rows], Sequence[float]], scale: float = 1
) -> Lines:
    lines = dict[str, list[Line]]()
    for label, runs in groups.items():
        places = [[(x, row) for x, row in zip(positions(run.rows), run.rows, strict=True)] for run in runs]
        scored = [
            [(x, scale * row[key]) for x, row in pairs if isinstance(row.get(key), int | float)] for pairs in places
        ]
        lines[label] = [([x for x, _ in pairs], [y for _, y in pairs]) for pairs in scored]
    return lines


def _dynamics(run: Run, key: str) -> Line:
    by_round: dict[int, list[float]] = {}
    for row in run.dynamics:
        if isinstance(row.get(key), int | float):
            by_round.setdefault(row["round"], []).append(float(row[key]))
    return list(by_round), [float(np.mean(values)) for values in by_round.values()]


def marks_of(run: Run) -> list[Mark]:
    """Return what changes in a run; nothing where its options are not known, as of a plug-in that is not there."""
    try:
        strategy, rounds = (
            resolve({**run.options, "resume": ""}, federation=True).make_strategy(1),
            int(run.rounds or 0),
        )
    except UsageError:
        return []
    freeze_at: float | None = getattr(strategy, "freeze_at", None)
    fired = (int(row["frozen-after"]) for row in run.rows if "frozen-after" in row)
    frozen = round_of(freeze_at, rounds) if freeze_at is not None else next(fired, None)
    drops = [change.start(rounds, frozen) for change in strategy.schedule]
    stage = next((row["round"] - 1 for row in run.rows if row.get("fedbs-stage") == 2), None)
    rounds_of = [("freeze", frozen), *(("learning rate", after) for after in drops), (STAGE, stage)]
    return [Mark(text, after) for text, after in rounds_of if after and after < rounds]


def draw_marks(axes: Any, marks: Mapping[str, Sequence[Mark]], colours: Mapping[str, str]) -> None:
    """Draw a line at every mark inside the axes, in the colour of the method if only one has it, else in grey."""
    labels: dict[Mark, list[str]] = {}
    for label, each in marks.items():
        for mark in dict.fromkeys(each):
            labels.setdefault(mark, []).append(label)
    first, last = axes.get_xlim()
    for after in sorted({mark.after for mark in labels if first < mark.after + 0.5 < last}):
        here = {mark.text: names for mark, names in labels.items() if mark.after == after}
        owners = {name for names in here.values() for name in names}
        colour = colours[owners.pop()] if len(owners) == 1 else "#555555"
        axes.axvline(after + 0.5, color=colour, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
        said = axes.annotate(", ".join(here), (after + 0.5, 0.99), color=colour, fontsize=8, **place)
        said.set_in_layout(False)


def _logarithmic(axes: Any) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5 times each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
