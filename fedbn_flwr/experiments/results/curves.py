"""Curves over rounds, exchanges and bytes: accuracy, loss, and what single methods record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.results.pictures import Line, Picture, draw_runs, file_name, line_style, points
from fedbn_flwr.experiments.results.rows import Row, options_of_run, rounds_of, score_of
from fedbn_flwr.experiments.results.values import heading_of
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


@dataclass(frozen=True)
class Rounds:
    """What a run has written about its rounds."""

    run: Row
    rows: Rows
    #: a row for each round and layer; empty if training dynamics were not recorded
    dynamics: Rows = ()


def curves(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw the curves of the first settings of runs."""
    settings: dict[str, dict[str, list[Rounds]]] = {}
    for row in rows:
        rounds = Rounds(row, rounds_of(row), rounds_of(row, "dynamics.jsonl"))
        settings.setdefault(row["setting"], {}).setdefault(row["label"], []).append(rounds)
    begun = {
        name: groups for name, groups in settings.items() if any(run.rows for runs in groups.values() for run in runs)
    }
    for name, groups in [*begun.items()][:SETTINGS]:
        yield from _setting(name, groups, few=len(begun) <= FEW)


def _setting(name: str, groups: Mapping[str, Sequence[Rounds]], few: bool) -> Iterator[Picture]:
    where = f" in {name}" if name else ""
    metric = score_of([run.run for runs in groups.values() for run in runs])
    marks = {label: marks_of(runs[0].run, runs[0].rows) for label, runs in groups.items()}
    for kind, (label, positions) in AXES.items() if few else [("rounds", AXES["rounds"])]:
        lines = {
            method: [points(run.rows, metric, positions(run.rows)) for run in runs] for method, runs in groups.items()
        }
        rows = [row for runs in groups.values() for run in runs for row in run.rows]
        if kind != "exchanges" or any((row.get("exchanges") or 1) > 1 for row in rows):
            caption = f"{metric.replace('-', ' ')} against {kind}{where}"
            yield from _picture(caption, f"{metric}-{kind}-{name}", name, lines, label, heading_of(metric), marks)
    for key in LOSSES if few else ():
        stages = key == "loss-deviation" and any(mark.text == STAGE for each in marks.values() for mark in each)
        caption = f"{LOSSES[key]}{f' and the round of {STAGE}' if stages else ''}{where}"
        lines = {method: [points(run.rows, key) for run in runs] for method, runs in groups.items()}
        yield from _picture(caption, f"{key}-{name}", name, lines, "round", LOSSES[key], marks, log=True)
    for key, text in DYNAMICS.items() if few else ():
        lines = {method: [_dynamics(run.dynamics, key) for run in runs] for method, runs in groups.items()}
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


def _dynamics(rows: Rows, key: str) -> Line:
    by_round: dict[int, list[float]] = {}
    for row in rows:
        if isinstance(row.get(key), int | float):
            by_round.setdefault(row["round"], []).append(float(row[key]))
    return list(by_round), [float(np.mean(values)) for values in by_round.values()]


def marks_of(run: Row, rows: Rows) -> list[Mark]:
    """Return what changes in a run; nothing where its options are not known, as of a plug-in that is not there."""
    options = options_of_run(run)
    rounds = int(options.get("rounds", 0))
    try:
        strategy = resolve({**options, "resume": ""}, federation=True).make_strategy(1)
    except UsageError:
        return []
    freeze_at: float | None = getattr(strategy, "freeze_at", None)
    fired = (int(row["frozen-after"]) for row in rows if "frozen-after" in row)
    frozen = round_of(freeze_at, rounds) if freeze_at is not None else next(fired, None)
    drops = [change.start(rounds, frozen) for change in strategy.schedule]
    stage = next((row["round"] - 1 for row in rows if row.get("fedbs-stage") == 2), None)
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
