"""Plots of accuracy (or mean IoU) and training loss over the rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.plugins import extra

Rows = Sequence[Mapping[str, Any]]

#: what models are compared by, the first that rows have
SCORES = {"mean-iou": "test mean IoU", "accuracy": "test accuracy"}
LOSS = {"train-loss": "training loss"}
STROKES = ("solid", "dashed", "dashdot", "dotted")
#: line widths of the first and the last method; where curves coincide, the wider one below stays visible
WIDTHS = (3.0, 1.2)
LEGEND_COLUMNS = 6


def plot_curves(runs: Mapping[str, Sequence[Rows]], path: Path, title: str = "") -> None:
    """Plot accuracy (or mean IoU) and training loss over the rounds: each method's mean over seeds, and the range."""
    with extra("cli"):  # imported here because it takes a second
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for seeds in runs.values() for seed in seeds for row in seed]
    score = next((key for key in SCORES if any(key in row for row in rows)), "accuracy")
    panels = {score: SCORES[score], **LOSS}
    legend_rows = -(-len(runs) // LEGEND_COLUMNS)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 4.3 + 0.2 * legend_rows), layout="constrained")
    for panel, (key, label) in zip(axes, panels.items(), strict=True):
        widths = np.linspace(*WIDTHS, len(runs))
        for index, (method, seeds) in enumerate(runs.items()):
            _line(panel, method, seeds, key, linestyle=STROKES[index % len(STROKES)], linewidth=widths[index])
        panel.set(xlabel="round", ylabel=label, xlim=(0, None))
        panel.grid(alpha=0.3)
    axes[1].set_yscale("log")
    figure.suptitle(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def title_of(summary: Mapping[str, Any]) -> str:
    """Return data, model, partition and clients of a run as one line."""
    return "{dataset}, {model}, {partition}, {clients} clients".format_map(summary)


def _line(panel: Any, method: str, seeds: Sequence[Rows], key: str, **style: Any) -> None:
    curves = [{row["round"]: row[key] for row in rows if row.get(key) is not None} for rows in seeds]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[item] for item in rounds] for curve in curves])
    marker = "o" if len(rounds) < 15 else None
    (line,) = panel.plot(rounds, values.mean(0), label=method, marker=marker, markersize=4, **style)
    if len(curves) > 1:
        panel.fill_between(rounds, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
