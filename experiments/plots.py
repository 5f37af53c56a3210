"""Pictures of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

Rows = Sequence[Mapping[str, Any]]


def plot_curves(runs: Mapping[str, Sequence[Rows]], path: Path) -> None:
    """Accuracy and training loss over the rounds, one line a method: the mean over its seeds, and their range."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for panel, key, label in zip(axes, ("accuracy", "train-loss"), ("test accuracy", "training loss"), strict=True):
        for method, seeds in runs.items():
            _line(panel, method, seeds, key)
        panel.set_xlabel("round")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    axes[1].set_yscale("log")
    axes[0].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _line(panel: Any, method: str, seeds: Sequence[Rows], key: str) -> None:
    curves = [{row["round"]: row[key] for row in rows if row.get(key) is not None} for rows in seeds]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[item] for item in rounds] for curve in curves])
    (line,) = panel.plot(rounds, values.mean(0), label=method, marker="o" if len(rounds) < 15 else None, markersize=3)
    if len(curves) > 1:
        panel.fill_between(rounds, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
