"""Curves over rounds, exchanges and bytes: accuracy, loss, and what single methods record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fedbn_flwr.experiments.output.plots import Line, draw_runs
from fedbn_flwr.experiments.reports.sources import Run, Source
from fedbn_flwr.experiments.reports.style import Picture, draw, finite, line_style, logarithmic, marked, whole_numbers

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
Rows = Sequence[Mapping[str, Any]]
#: label -> the runs' lines
Lines = Mapping[str, Sequence[Line]]


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
    file = "".join(letter if letter.isalnum() else "-" for letter in name)
    metric = next((run.metric for runs in groups.values() for run in runs if run.summary), "accuracy")
    score = metric.replace("-", " ")
    axes: dict[str, tuple[str, Callable[[Rows], Sequence[float]]]] = {"rounds": ("round", _rounds)}
    if few:
        axes |= {"exchanges": ("exchanges", _exchanges), "bytes": ("MB sent, as papers count", _megabytes)}
    for kind, (label, positions) in axes.items():
        lines = _lines(groups, metric, positions, scale=100)
        if kind != "exchanges" or _exchange_more_often(groups):
            yield from _picture(
                f"{score} against {kind}{where}", f"{metric}-{kind}-{file}", lines, label, f"{score}, %", kind
            )
    for key in LOSSES if few else ():
        lines, stages = _lines(groups, key, _rounds), _stages(groups) if key == "loss-deviation" else {}
        caption = f"{LOSSES[key]}{' and the round of stage 2' if stages else ''}{where}"
        yield from _picture(caption, f"{key}-{file}", lines, "round", LOSSES[key], log=True, stages=stages)
    for key, text in DYNAMICS.items() if few else ():
        lines = {label: [_dynamics(run, key) for run in runs] for label, runs in groups.items()}
        yield from _picture(f"{text}, mean of all layers{where}", f"{key}-{file}", lines, "round", text[4:], log=True)


def _picture(
    caption: str,
    name: str,
    lines: Lines,
    x: str,
    y: str,
    kind: str = "",
    log: bool = False,
    stages: Mapping[str, float] | None = None,
) -> Iterator[Picture]:
    """Draw lines, if one has two points: the mean of a method's runs, and their range."""
    drawn = {label: [line for line in runs if _has_points(line)] for label, runs in lines.items()}
    drawn = {label: runs for label, runs in drawn.items() if runs}
    if all(len(x) < 2 for runs in drawn.values() for x, _ in runs):
        return
    styles = {label: line_style(index, len(lines)) for index, label in enumerate(lines)}
    values = [value for runs in drawn.values() for _, line in runs for value in line if np.isfinite(value)]

    def paint(axes: Any) -> None:
        for index, (label, runs) in enumerate(drawn.items()):
            step = marked(index, min(len(x) for x, _ in runs))
            draw_runs(axes, runs, label=label, markevery=step, **styles[label])
        for label, position in (stages or {}).items():
            axes.axvline(position, color=styles[label]["color"], linestyle=styles[label]["linestyle"], linewidth=1)
            axes.annotate(
                f" stage 2: {label}", (position, 0.97), xycoords=("data", "axes fraction"), fontsize=9, va="top"
            )
        axes.set(xlabel=x, ylabel=y)
        if x == "round":
            whole_numbers(axes)
        if log and max(values) > DECADE * min(values) > 0:
            axes.set_yscale("log")
        if kind in ("exchanges", "bytes") and _spread(drawn) > 5:
            logarithmic(axes)
        axes.grid(alpha=0.3)

    yield draw(name.rstrip("-"), caption[0].upper() + caption[1:], paint)


def _lines(
    groups: Mapping[str, Sequence[Run]], key: str, positions: Callable[[Rows], Sequence[float]], scale: float = 1
) -> Lines:
    lines = {}
    for label, runs in groups.items():
        places = [[(x, row) for x, row in zip(positions(run.rows), run.rows, strict=True)] for run in runs]
        scored = [[(x, scale * row[key]) for x, row in pairs if _is_number(row.get(key))] for pairs in places]
        lines[label] = [([x for x, _ in pairs], finite([y for _, y in pairs])) for pairs in scored]
    return lines


def _dynamics(run: Run, key: str) -> Line:
    """Return the mean over layers of each round."""
    by_round: dict[int, list[float]] = {}
    for row in run.dynamics:
        if isinstance(row.get(key), int | float):
            by_round.setdefault(row["round"], []).append(float(row[key]))
    return list(by_round), [float(np.mean(values)) for values in by_round.values()]


def _rounds(rows: Rows) -> list[float]:
    return [row["round"] for row in rows]


def _exchanges(rows: Rows) -> list[float]:
    return list(accumulate(row.get("exchanges") or 0 for row in rows))


def _megabytes(rows: Rows) -> list[float]:
    return list(accumulate((row.get("paper-bytes") or 0) / 2**20 for row in rows))


def _exchange_more_often(groups: Mapping[str, Sequence[Run]]) -> bool:
    return any((row.get("exchanges") or 1) > 1 for runs in groups.values() for run in runs for row in run.rows)


def _stages(groups: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the first round of stage 2, in the first run of every method that has reached one."""
    stages = dict[str, float]()
    for label, runs in groups.items():
        first = [row["round"] for run in runs[:1] for row in run.rows if row.get("fedbs-stage") == 2]
        stages |= {label: first[0]} if first else {}
    return stages


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _has_points(line: Line) -> bool:
    return any(np.isfinite(value) for value in line[1]) and max(line[0]) > 0


def _spread(lines: Lines) -> float:
    """Return by what factor the ends of the lines differ."""
    ends = [max(x) for runs in lines.values() for x, _ in runs]
    return max(ends) / min(ends)
